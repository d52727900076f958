"""What a job's answers come from: a change under the same names is noticed, a copy is the same."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")
import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402

from fusedvit.corpus import origin  # noqa: E402
from fusedvit.corpus.inputs import collect, digest  # noqa: E402
from fusedvit.errors import InputError  # noqa: E402

WEIGHTS = "model-00002-of-00002.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1, "b": {"c": 2}}')
    (folder / "preprocessor_config.json").write_text('{"size": 448}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(bytes(3000))
    save_file({"x": torch.zeros(3)}, folder / "model-00001-of-00002.safetensors")
    save_file({"small": torch.zeros(3), "large": torch.zeros(5000), "last": torch.zeros(700)}, folder / WEIGHTS)
    return folder


def changed(name: str, at: int | slice) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors[name][at] += 1e-3
        save_file(tensors, folder / WEIGHTS)

    return change


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (changed("small", 1), "weights"),
        (changed("large", 0), "weights"),
        (changed("large", -1), "weights"),
        (changed("last", slice(None)), "weights"),
        (lambda folder: (folder / WEIGHTS).unlink(), "weights"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "other.safetensors"), "weights"),
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(bytes(2999) + b"x"), "weights"),
        (lambda folder: os.truncate(folder / WEIGHTS, 100), "weights"),
        (text("model.safetensors.index.json", "{}"), "weights"),
        (text("config.json", '{"a": 1, "b": {"c": 3}}'), "config"),
        (text("adapter_config.json", '{"r": 8}'), "config"),
        (text("preprocessor_config.json", '{"size": 336}'), "processor"),
        (text("video_preprocessor_config.json", "{}"), "processor"),
        (text("processor_config.json", "["), "processor"),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "processor"),
    ],
)
def test_another_checkpoint(checkpoint: Path, change: Callable[[Path], object], what: str) -> None:
    before = origin.checkpoint(str(checkpoint))
    change(checkpoint)
    after = origin.checkpoint(str(checkpoint))
    assert {name for name in before if before[name] != after[name]} == {what}


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: [os.utime(path, (1, 1)) for path in folder.iterdir()],
        text("config.json", '{\n "b": {"c": 2},\n "a": 1}\n'),
        text("tokenizer.json", '{"a": 1}'),
        text("README.md", "read me"),
        lambda folder: (
            shutil.copytree(folder, f"{folder}-copy"),
            shutil.rmtree(folder),
            os.rename(f"{folder}-copy", folder),
        ),
    ],
)
def test_the_same_checkpoint(checkpoint: Path, change: Callable[[Path], object]) -> None:
    before = origin.checkpoint(str(checkpoint))
    change(checkpoint)
    assert origin.checkpoint(str(checkpoint)) == before


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        origin.checkpoint(str(tmp_path / "absent"))


def table_of(table: Path, ids: bool, **columns: list[object]) -> Path:
    names = {"id": [f"n{i}" for i in range(len(next(iter(columns.values()))))]} if ids else {}
    pyarrow.parquet.write_table(pyarrow.table(names | columns), table)
    return table


@pytest.mark.parametrize("size", [10, 5000, 200_000])
@pytest.mark.parametrize("ids", [False, True])
def test_another_table_of_as_many_rows(tmp_path: Path, size: int, ids: bool) -> None:
    """Where rows have no ids; noise of the same sizes."""
    rng, found = np.random.default_rng(0), []
    for _ in range(2):
        table = table_of(tmp_path / "t.parquet", ids, image=[rng.bytes(size) for _ in range(5)])
        found += [origin.tables(collect([table])), origin.tables(collect([table]))]
    assert found[0] == found[1] and found[2] == found[3]
    assert (found == [""] * 4) if ids else (found[0] != found[2])


def listed(folder: Path) -> Path:
    (folder / "l.txt").write_text("0.png\n1.png\n")
    return folder / "l.txt"


@pytest.mark.parametrize(
    "make",
    [
        listed,
        lambda folder: table_of(folder / "t.parquet", False, path=["0.png", "1.png"]),
        lambda folder: table_of(folder / "t.parquet", True, path=["0.png", "1.png"]),
        lambda folder: table_of(folder / "t.parquet", True, bytes=[folder.name.encode()] * 2),
    ],
)
def test_inputs_of_the_same_names_elsewhere(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        found.append(collect([make(tmp_path / name)]))
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    found.append(collect([tmp_path / "linked" / next((tmp_path / "a").iterdir()).name]))
    assert len({digest(each) for each in found}) == 1
    first, other, linked = (origin.files(each) for each in found)
    assert first == linked != other


def test_a_table_of_the_same_ids_and_other_paths(tmp_path: Path) -> None:
    """Somewhere among many, whose file is not sampled."""
    paths, found = [f"{i:06d}" for i in range(60_000)], []
    for at in (None, 0, 31_234, -1):
        given = [*paths]
        if at is not None:
            given[at] = "others"
        found.append(origin.files(collect([table_of(tmp_path / "t.parquet", False, id=paths, path=given)])))
    assert len(set(found)) == len(found)


def test_a_link_that_leads_elsewhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").touch()
    found = []
    for name in ("a", "b", "a"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / name)
        found.append(origin.files(collect([tmp_path / "link"])))
    assert found[0] == found[2] != found[1]


def test_folders_from_which_names_lead_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert origin.working_directory([str(tmp_path / "a"), "b"]) == str(tmp_path)
    assert origin.working_directory([str(tmp_path / "a")]) == ""


def test_documents_are_read_as_json(checkpoint: Path) -> None:
    assert json.loads(json.dumps(origin.checkpoint(str(checkpoint)))) == origin.checkpoint(str(checkpoint))


def test_documents_deeper_than_python_reads(checkpoint: Path) -> None:
    """Loading the checkpoint says what is wrong."""
    deep = b"[" * 100_000
    (checkpoint / "config.json").write_bytes(deep)
    (checkpoint / WEIGHTS).write_bytes(len(deep).to_bytes(8, "little") + deep)
    assert origin.checkpoint(str(checkpoint)) == origin.checkpoint(str(checkpoint))
