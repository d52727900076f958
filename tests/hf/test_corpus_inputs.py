"""What a corpus is made of: folders, files, lists and tables, and what is none of these."""

import inspect
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402

from fusedvit.corpus import inputs  # noqa: E402
from fusedvit.errors import InputError  # noqa: E402
from tests.support.checkpoint import noisy_pictures  # noqa: E402

COUNT = 5


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_pictures(tmp_path_factory.mktemp("pictures"), COUNT, (40, 50), "04.png")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: folder / "absent", "no such file or folder"),
        (lambda folder: "https://host/picture.png", "https://host/picture.png: a URL; download it and give the file"),
        (lambda folder: folder, "no images or videos"),
        (lambda folder: written(folder / "x.parquet", b"PAR1"), "no parquet file that reads"),
        (lambda folder: written(folder / "x.csv", b"a"), "expected"),
        (lambda folder: twice_called(folder / "x.parquet", ["image", "image"]), "one column image expected, got 2"),
        (lambda folder: twice_called(folder / "x.parquet", ["image", "id", "id"]), "one column id expected, got 2"),
        (lambda folder: folder / ("x" * 300 + ".png"), "cannot be read: File name too long"),
        (lambda folder: "/dev/null", "/dev/null: neither a folder nor a regular file"),
        (lambda folder: "", "expected, got ''"),
    ],
)
def test_inputs_that_are_none(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        inputs.collect([make(tmp_path)])


def twice_called(table: Path, names: list[str]) -> Path:
    column = pyarrow.array([b"a"])
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([column] * len(names), names=names), table)
    return table


def test_folders_that_are_links(pictures: Path, tmp_path: Path) -> None:
    """They are searched through like others, each under its own name, and not in circles."""
    given = tmp_path / "given"
    (given / "inside").mkdir(parents=True)
    other = tmp_path / "other"
    shutil.copytree(pictures, other)
    shutil.copy(pictures / "00.png", given / "a.png")
    (given / "linked").symlink_to(other)
    (given / "inside" / "linked").symlink_to(other)
    (given / "inside" / "up").symlink_to(given)
    (other / "back.png").symlink_to(given)  # a folder, whatever its name
    (other / "itself").symlink_to("itself")
    names = {path.name for path in pictures.glob("*.png")}
    wanted = {"a.png"} | {f"{at}/{name}" for at in ("linked", "inside/linked") for name in names}
    found = inputs.collect([given])
    assert [each.path for each in found] == sorted(each.path for each in found)
    assert {str(each.path.relative_to(given)) for each in found} == wanted
    from_inside = {str(each.path.relative_to(other)) for each in inputs.collect([other])}
    assert from_inside == names | {"back.png/a.png"} and len(names) == COUNT


def test_deep_folders(pictures: Path, tmp_path: Path) -> None:
    """Of more levels than Python's stack has frames."""
    folder = tmp_path
    for _ in range(200):
        folder = folder / "a"
        folder.mkdir()
    shutil.copy(pictures / "00.png", folder)
    frames, limit = len(inspect.stack(0)), sys.getrecursionlimit()
    sys.setrecursionlimit(frames + 150)
    try:
        found = inputs.collect([tmp_path])
    finally:
        sys.setrecursionlimit(limit)
    assert [each.path for each in found] == [folder / "00.png"]


def test_inputs_of_one_name(pictures: Path) -> None:
    with pytest.raises(InputError, match="two inputs are called"):
        inputs.collect([pictures, sorted(pictures.glob("*.png"))[0]])


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
