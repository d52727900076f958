"""What a corpus is made of: folders, files, lists and tables, and what is none of these."""

import inspect
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from fusedvit.corpus import inputs, shards  # noqa: E402
from fusedvit.corpus import job as corpus_job  # noqa: E402
from fusedvit.corpus.embedder import embedder_of  # noqa: E402
from fusedvit.errors import InputError  # noqa: E402
from fusedvit.pixels import streaming  # noqa: E402
from fusedvit.serving import ray as on_ray  # noqa: E402
from tests.support.checkpoint import checkpoint, pictures, tiny_processor  # noqa: E402

__all__ = ["checkpoint", "pictures"]  # fixtures
COUNT = 5
PICTURES = COUNT, (40, 50), "04.png"


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


# ── what is replaced while a job works ────────────────────────────────────────────────────────────────────────────────


def table_of(contents: list[bytes], path: Path) -> Path:
    names = [f"picture {i}" for i in range(len(contents))]
    pyarrow.parquet.write_table(pyarrow.table({"id": names, "image": contents}), path)
    return path


def test_a_table_that_is_replaced_while_a_job_works(
    checkpoint: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of the same names. Shards of the first one stay, and the job goes on once it is put back."""
    contents = [path.read_bytes() for path in sorted(pictures.glob("*.png"))[:4]] * 20
    table, kept = table_of(contents, tmp_path / "t.parquet"), tmp_path / "kept"
    shutil.copy(table, kept)
    job = corpus_job.Job(str(checkpoint), (str(table),), str(tmp_path / "out"), shard_size=1, device="cpu")
    monkeypatch.setattr(streaming, "_DECODED_BYTES", 1)
    begun: list[int] = []

    def replaced(shard: corpus_job.ShardDone, total: int) -> None:
        if not begun:
            table_of(contents[::-1], table)
        begun.append(shard.number)

    with pytest.raises(InputError, match=f"{table}: the table that the job began with expected, got another .digest"):
        corpus_job.run(job, [], embedder_of, replaced)
    there = shards.committed(tmp_path / "out")
    assert there == set(begun) and 0 < len(there) < len(contents)
    with pytest.raises(InputError, match=r"inputs of the same names .* or are a table of other content"):
        corpus_job.run(job, [], embedder_of, replaced)
    shutil.copy(kept, table)
    corpus_job.run(job, [], embedder_of, replaced)
    assert len(shards.committed(tmp_path / "out")) == len(contents)
    for i, image in enumerate(contents[:4]):
        (wanted,) = embedder_of(job).embed(image)
        for number in range(i, len(contents), 4):
            (row,) = shards.read(tmp_path / "out", number)
            assert row.id == f"picture {number}" and row.error == ""
            torch.testing.assert_close(row.rows, wanted.rows, atol=1e-4, rtol=1e-4)


def test_a_table_that_is_replaced_before_another_node_decodes(checkpoint: Path, pictures: Path, tmp_path: Path) -> None:
    """Ray's actors get rows that the driver has listed."""
    contents = [path.read_bytes() for path in sorted(pictures.glob("*.png"))[:4]]
    table = table_of(contents, tmp_path / "t.parquet")
    row = {"number": 0, "given": pickle.dumps(inputs.collect([table]))}
    assert len(pickle.loads(on_ray._Decoder(str(checkpoint))(row)["pixels"])) == 4
    table_of(contents[::-1], table)
    with pytest.raises(InputError, match=f"{table}: the table that the job began with expected"):
        on_ray._Decoder(str(checkpoint))(row)


def other_weights(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    moved = {name: tensor + 1e-3 for name, tensor in tensors.items()}
    save_file(moved, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_weights, "the checkpoint's weights"),
        (lambda model: tiny_processor(32).save_pretrained(model), "the processor's settings"),
    ],
)
def test_a_checkpoint_that_is_replaced_while_a_job_works(
    checkpoint: Path, pictures: Path, tmp_path: Path, change: Any, said: str
) -> None:
    """Before a process of the job loads it."""
    model = shutil.copytree(checkpoint, tmp_path / "model")
    job = corpus_job.Job(str(model), (str(pictures),), str(tmp_path / "out"), device="cpu")

    def build(job: corpus_job.Job) -> Any:
        change(model)
        return embedder_of(job)

    with pytest.raises(InputError, match=f"out: holds another job: {said} that it was begun with expected, got others"):
        corpus_job.run(job, [], build, lambda shard, total: None)


def test_a_row_that_is_no_picture_is_named(checkpoint: Path, tmp_path: Path) -> None:
    """By its table and number, wherever the run began."""
    table = table_of([b"no picture"] * 3, tmp_path / "t.parquet")
    job = corpus_job.Job(str(checkpoint), (str(table),), str(tmp_path / "out"), shard_size=1, device="cpu")
    for _ in range(2):
        corpus_job.run(job, [], embedder_of, lambda shard, total: None)
        found = [each.error for number in range(3) for each in shards.read(tmp_path / "out", number)]
        said = "does not decode as an image (no format that Pillow knows)"
        assert found == [f"{table}:{row}: {said}" for row in range(3)]
        shutil.rmtree(tmp_path / "out" / "shard-00002")
