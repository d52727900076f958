"""A corpus as a list of inputs: what is odd becomes an error of its own, a row with its error, or is taken as it is."""

import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402

from fusedvit.corpus.inputs import collect, digest, in_words, sources  # noqa: E402
from fusedvit.errors import InputError  # noqa: E402
from fusedvit.pixels.media import MediaError, load  # noqa: E402


def table(folder: Path, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet", row_group_size=2)
    return folder / "t.parquet"


def content(path: Path) -> list[Any]:
    """The sources of a table's rows, errors as what they say."""
    return [str(each) if isinstance(each, MediaError) else each for each in sources(collect([path]))]


def test_a_folder(tmp_path: Path) -> None:
    """Odd names, links to nothing and to folders around them; a pipe or a folder is no file."""
    (tmp_path / "in").mkdir()
    for name in ("b.png", "a b\n☃.JPG", ".hidden.png", "in/c.mp4", "x.txt"):
        (tmp_path / name).touch()
    (tmp_path / "gone.png").symlink_to(tmp_path / "nothing")
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    (tmp_path / "in" / "loop").symlink_to(tmp_path)
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    found = [each.id for each in collect([tmp_path])]
    names = [".hidden.png", "a b\n☃.JPG", "b.png", "gone.png", "in/c.mp4", "self.png"]
    assert found == [str(tmp_path / name) for name in names]


def test_suffixes_of_a_folder(tmp_path: Path) -> None:
    """Those that Pillow decodes here, and videos, in any case; the rest is counted by suffix."""
    image = pytest.importorskip("PIL.Image")
    image.init()
    wanted = {".jfif", ".jpe", ".jp2", ".ppm", ".pgm", ".ico", ".tga", ".apng", ".Mp4", ".mpg", ".wmv", ".3gp"}
    wanted |= {".avif", ".AVIFS"} if "AVIF" in image.OPEN else set()
    others = {".heic": 2, ".eps": 1, ".h5": 1, ".txt": 3, "": 1, ".json": 1}
    for suffix in wanted:
        (tmp_path / f"x{suffix}").touch()
    for suffix, count in others.items():
        for i in range(count):
            (tmp_path / f"{i}{suffix}").touch()
    left_out: Counter[str] = Counter()
    assert {each.path.suffix for each in collect([tmp_path], left_out)} == wanted
    assert left_out == others
    assert in_words(left_out).startswith("left out of folders, by suffix: '.txt' 3, '.heic' 2, ")


def test_a_folder_of_other_files(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"a.x{i}").touch()
    with pytest.raises(
        InputError, match=r"no images or videos in .*left out of folders, by suffix: '.x\d+' 1.*others 12"
    ):
        collect([tmp_path])


def test_a_plugin_of_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    image.init()
    (tmp_path / "a.heic").touch()
    monkeypatch.setitem(image.OPEN, "HEIF", (lambda *args: None, None))
    monkeypatch.setitem(image.EXTENSION, ".heic", "HEIF")
    assert [each.path.name for each in collect([tmp_path])] == ["a.heic"]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff.png"
    try:
        open(name, "wb").close()
    except OSError:
        pytest.skip("this file system takes no such names")
    (found,) = collect([tmp_path])
    assert found.id == str(tmp_path / "\\xff.png") and found.path.is_file()
    assert pyarrow.array([found.id]).to_pylist() == [found.id] and digest([found])


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.png").touch()
    scan = os.scandir

    def refusing(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(InputError, match="closed: a folder that cannot be read: .*Permission denied"):
        collect([tmp_path])


def test_a_folder_that_goes_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As unfinished shards do where the output is in the input."""
    (tmp_path / "out" / ".unfinished-1").mkdir(parents=True)
    (tmp_path / "a.png").touch()
    scan = os.scandir

    def late(path: Any) -> Any:
        if ".unfinished-1" in str(path):
            os.rmdir(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", late)
    assert [each.path.name for each in collect([tmp_path])] == ["a.png"]


@pytest.mark.parametrize("text", [b"a.png\r\n\r\n b.png \r\n", b"\xef\xbb\xbfa.png\nb.png", b"\na.png\nb.png\n"])
def test_lists(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "l.txt").write_bytes(text)
    found = collect([tmp_path / "l.txt"])
    assert [each.id for each in found] == ["a.png", "b.png"]
    assert [each.path for each in found] == [tmp_path / "a.png", tmp_path / "b.png"]


def test_a_list_splits_at_newlines_alone(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("a\u2028b\x0c.png\n", encoding="utf-8")
    assert [each.id for each in collect([tmp_path / "l.txt"])] == ["a\u2028b\x0c.png"]


@pytest.mark.parametrize(
    "text, said",
    [
        ("a.png\n".encode("utf-16"), "in UTF-8 expected"),
        (b"a.png\ns3://bucket/b.png\n", "s3://bucket/b.png: a URL"),
        (b"a.png\na.png\n", "two inputs are called 'a.png'"),
        (b"\n \n", "no images or videos"),
    ],
)
def test_lists_that_are_none(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "l.txt").write_bytes(text)
    with pytest.raises(InputError, match=said):
        collect([tmp_path / "l.txt"])


NONE = "fusedvit: a file's bytes or path expected, got none"


@pytest.mark.parametrize(
    "columns, expected",
    [
        ({"image": [b"1", None, b"", b"4"]}, lambda folder: [b"1", NONE, NONE, b"4"]),
        (
            {
                "image": [
                    {"bytes": b"1", "path": "p"},
                    None,
                    {"bytes": None, "path": None},
                    {"bytes": None, "path": "q"},
                ]
            },
            lambda folder: [b"1", NONE, NONE, folder / "q"],
        ),
        ({"path": ["a.png", None, ""]}, lambda folder: [folder / "a.png", NONE, NONE]),
        ({"file": ["a.png", "s3://b/c.png"]}, lambda folder: [folder / "a.png", "s3://b/c.png"]),
        ({"bytes": pyarrow.array([b"1", None], pyarrow.large_binary())}, lambda folder: [b"1", NONE]),
        ({"path": pyarrow.array(["a", "b"]).dictionary_encode()}, lambda folder: [folder / "a", folder / "b"]),
    ],
)
def test_rows_without_content_are_errors(
    tmp_path: Path, columns: dict[str, Any], expected: Callable[[Path], list[Any]]
) -> None:
    assert content(table(tmp_path, **columns)) == expected(tmp_path)


@pytest.mark.parametrize(
    "columns, ids",
    [
        ({"id": [7, 8], "image": [b"1", b"2"], "path": ["a", "b"]}, ["7", "8"]),
        ({"image": [b"1", b"2"], "path": ["a", None]}, ["a", "{table}:1"]),
        ({"image": [b"1", b"2"]}, ["{table}:0", "{table}:1"]),
    ],
)
def test_ids_of_rows(tmp_path: Path, columns: dict[str, Any], ids: list[str]) -> None:
    path = table(tmp_path, **columns)
    assert [each.id for each in collect([path])] == [each.format(table=path) for each in ids]


@pytest.mark.parametrize(
    "columns, said",
    [
        ({"x": [1]}, r"a column of .* expected, got \['x'\]"),
        ({"image": [1]}, "column image: .* expected, got int64"),
        ({"image": [[1.0]]}, "column image: .* expected, got list"),
        ({"image": [[b"1"]]}, "column image: .* expected, got list<.*binary"),
        ({"bytes": [["1", "2"]]}, "column bytes: .* expected, got list<.*string"),
        ({"path": pyarrow.array([[b"1"]], pyarrow.large_list(pyarrow.binary()))}, "column path: .* got large_list"),
        (
            {"image": pyarrow.array([[b"1"]], pyarrow.list_(pyarrow.binary(), 1))},
            "column image: .* got fixed_size_list",
        ),
        (
            {"image": pyarrow.array([[("bytes", b"1")]], pyarrow.map_(pyarrow.string(), pyarrow.binary()))},
            "column image: .* expected, got map<string, binary",
        ),
        ({"image": [{"bytes": [b"1"], "path": ["p"]}]}, "column image: .* expected, got struct<bytes: list"),
        ({"image": [{"bytes": {"binary": 1}}]}, "column image: .* expected, got struct<bytes: struct"),
        ({"image": [{"string": "a", "path": 7}]}, "column image: .* expected, got struct"),
        ({"image": pyarrow.nulls(2)}, "column image: .* expected, got null"),
        ({"path": [1]}, "column path: .* expected, got int64"),
        ({"image": [{"x": 1}]}, "column image: .* expected, got struct"),
        ({"id": ["a", None], "image": [b"1", b"2"]}, "an id of every row expected, got null in row 1"),
        ({"id": ["a", "a"], "image": [b"1", b"2"]}, "two inputs are called 'a'"),
        ({"image": pyarrow.array([], pyarrow.binary())}, "no images or videos"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        collect([table(tmp_path, **columns)])


LATIN_1 = pyarrow.Array.from_buffers(  # text that is not UTF-8, which Arrow does not check
    pyarrow.string(), 2, [None, pyarrow.array([0, 3, 4], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xe9bc")]
)


@pytest.mark.parametrize(
    "columns, said",
    [
        ({"id": LATIN_1, "bytes": [b"1", b"2"]}, "column id: row 0 does not convert to Python: .*codec"),
        ({"path": LATIN_1}, "column path: row 0 does not convert"),
        ({"id": pyarrow.array([2, 2**40], pyarrow.timestamp("s")), "bytes": [b"1", b"2"]}, "column id: row 1 does not"),
        ({"id": pyarrow.array([2**60, 1], pyarrow.duration("s")), "bytes": [b"1", b"2"]}, "column id: row 0 does not"),
    ],
)
def test_names_of_rows_that_do_not_convert(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"t.parquet: {said}"):
        collect([table(tmp_path, **columns)])


def test_contents_that_do_not_convert(tmp_path: Path) -> None:
    """A path is a row's error where it is needed, and not read where it is not."""
    (bad, good) = content(table(tmp_path, id=["0", "1"], path=LATIN_1))
    assert "does not convert: 'utf-8' codec" in bad and good == tmp_path / "c"
    for first in (b"1", None):
        contents = pyarrow.array([first, b"2"], pyarrow.binary())
        found = content(table(tmp_path, image=pyarrow.StructArray.from_arrays([contents, LATIN_1], ["bytes", "path"])))
        assert found[1] == b"2" and (found[0] == b"1" if first else "does not convert" in found[0])


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.binary(),
        pyarrow.large_binary(),
        pyarrow.binary(1),
        pyarrow.binary_view(),
        pyarrow.dictionary("int32", pyarrow.binary()),
    ]
    + [pyarrow.struct([("bytes", pyarrow.large_binary()), ("path", pyarrow.int8())])],
    ids=str,
)
def test_types_that_hold_contents(tmp_path: Path, kind: Any) -> None:
    values = [{"bytes": b"1"}, {"bytes": b"2"}] if pyarrow.types.is_struct(kind) else [b"1", b"2"]
    assert content(
        table(
            tmp_path,
            image=pyarrow.array(values).cast(kind)
            if pyarrow.types.is_dictionary(kind)
            else pyarrow.array(values, kind),
        )
    ) == [b"1", b"2"]


@pytest.mark.parametrize("group", [3, 10, 40])
@pytest.mark.parametrize("shard", [1, 4, 40])
def test_a_group_of_rows_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, shard: int) -> None:
    """However many shards lie in it; a table that is replaced and listed again is read anew, and of several each."""
    read, reads = pyarrow.parquet.ParquetFile.read_row_group, []

    def counted(self: Any, number: int, **options: Any) -> Any:
        reads.append(number)
        return read(self, number, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", counted)
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for version in (b"1", b"2"):
        for path in paths:
            rows = [b"%d %s %s" % (i, version, path.stem.encode()) for i in range(40)]
            pyarrow.parquet.write_table(pyarrow.table({"image": rows}), path, row_group_size=group)
        reads.clear()
        found = collect(paths)
        taken = [each for i in range(0, 80, shard) for each in sources(found[i : i + shard])]
        assert taken == [b"%d %s %s" % (i, version, path.stem.encode()) for path in paths for i in range(40)]
        assert len(reads) == 2 * -(-40 // group)


def test_a_table_that_is_replaced_or_vanishes(tmp_path: Path) -> None:
    """Between two shards; by other contents of other or the same sizes. One that is put back goes on."""
    path = table(tmp_path, image=[b"1", b"2", b"3"])
    found, kept = collect([path]), path.read_bytes()
    for others in ([b"1"], [b"3", b"2", b"1"], [b"1", b"2", b"3", b"4"]):
        assert list(sources(found[:1])) == [b"1"]
        table(tmp_path, image=others)
        with pytest.raises(InputError, match=f"{path}: the table that the job began with expected, got another"):
            next(sources(found[:1]))
        path.write_bytes(kept)
        assert list(sources(found)) == [b"1", b"2", b"3"]
    path.unlink()
    with pytest.raises(InputError, match="no parquet file that reads"):
        list(sources(found))


@pytest.mark.parametrize("write", ["over the file", "to another file that takes its place"])
@pytest.mark.parametrize("others", [[b"5", b"6", b"7", b"8"], [b"0" * 999] * 4])
def test_a_table_that_is_written_within_a_shard(tmp_path: Path, write: str, others: list[bytes]) -> None:
    """Rows of the group in memory may still come, of other groups none."""
    path = table(tmp_path, image=[b"1", b"2", b"3", b"4"])
    given = sources(collect([path]))
    assert next(given) == b"1"
    (tmp_path / "new").mkdir()
    new = table(tmp_path / "new", image=others)
    if write == "over the file":
        path.write_bytes(new.read_bytes())
    else:
        os.replace(new, path)
    assert next(given) == b"2"
    with pytest.raises(InputError, match=f"{path}: the table that the job began with expected, got another"):
        next(given)


def test_a_table_that_is_replaced_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names are the old one's, its contents the new one's."""
    read_table = pyarrow.parquet.read_table

    def replaced_after(path: Path, **options: Any) -> Any:
        try:
            return read_table(path, **options)
        finally:
            table(tmp_path, id=["b", "a"], image=[b"2", b"1"])

    monkeypatch.setattr(pyarrow.parquet, "read_table", replaced_after)
    found = collect([table(tmp_path, id=["a", "b"], image=[b"1", b"2"])])
    with pytest.raises(InputError, match="the table that the job began with expected"):
        next(sources(found))


def test_errors_of_rows_name_the_table_and_the_row(tmp_path: Path) -> None:
    path = table(tmp_path, id=["a", "b", "c"], image=[b"1", b"2", b"3"])
    (source,) = sources(collect([path])[2:])
    for given in (source, pickle.loads(pickle.dumps(source))):
        with pytest.raises(MediaError, match=f"^fusedvit: {path}:2: does not decode as an image"):
            load([b"x", given][1:])
