"""`Embedder` and `fusedvit embed` on a tiny checkpoint: against Hugging Face's own processor and tower, and killed."""

import contextlib
import functools
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoImageProcessor  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import fusedvit  # noqa: E402
from fusedvit.cli import embed  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.cli.media import SAMPLE_IMAGE  # noqa: E402
from fusedvit.cli.towers import TINY  # noqa: E402
from fusedvit.corpus import job as corpus_job  # noqa: E402
from fusedvit.corpus import shards  # noqa: E402
from fusedvit.corpus.embedder import embedder_of  # noqa: E402
from fusedvit.corpus.inputs import collect  # noqa: E402
from fusedvit.errors import PREFIX, InputError  # noqa: E402
from fusedvit.pixels import streaming  # noqa: E402
from fusedvit.serving import ray as on_ray  # noqa: E402
from tests.support.checkpoint import checkpoint, pictures, tiny_processor, whole_model  # noqa: E402

__all__ = ["checkpoint", "pictures"]  # fixtures
COUNT = 11
PICTURES = COUNT, (40, 150), "05.png"
RUNNER = CliRunner(env={"COLUMNS": "200"})
IN_FP32 = "--device", "cpu"  # as `expected` is: on a GPU the command takes bf16


@pytest.fixture
def model(checkpoint: Path) -> Any:
    return whole_model(checkpoint)


@pytest.fixture
def job(checkpoint: Path, pictures: Path, tmp_path: Path) -> corpus_job.Job:
    return corpus_job.Job(str(checkpoint), (str(pictures),), str(tmp_path / "out"), shard_size=4, device="cpu")


@pytest.fixture
def command(checkpoint: Path, pictures: Path, tmp_path: Path) -> list[str]:
    return ["embed", str(checkpoint), str(pictures), str(tmp_path / "out"), "--shard-size", "4", *IN_FP32]


def run(job: corpus_job.Job, gpus: Any = (), build: Any = embedder_of, done: Any = lambda shard, total: None) -> Any:
    return corpus_job.run(job, [*gpus], build, done)


def embedder_by(model: Any, encode: Any) -> fusedvit.Embedder:
    return fusedvit.Embedder(model, tiny_processor(), encode=encode)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, pictures: Path) -> dict[str, torch.Tensor]:
    """Tokens of every good picture, with deepstack, from Hugging Face's own code, by its name."""
    tower = whole_model(checkpoint).model.visual
    processor = AutoImageProcessor.from_pretrained(checkpoint)  # torchvision's, where that is installed
    rows = {}
    for path in sorted(pictures.glob("*.png")):
        if path.name == "05.png":
            continue
        given = processor(images=[Image.open(path)], return_tensors="pt")
        with torch.no_grad():
            found = tower(given["pixel_values"], grid_thw=given["image_grid_thw"])
        rows[path.name] = torch.cat([found.pooler_output, *found.deepstack_features], 1)
    return rows


def close(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(np.asarray(found)), wanted, atol=1e-4, rtol=1e-4)


def columns_of(pictures: Path) -> dict[str, list[Any]]:
    """The ways in which a batch may name its pictures."""
    paths = sorted(pictures.glob("*.png"))
    return {
        "path": [str(path) for path in paths],
        "bytes": [path.read_bytes() for path in paths],
        "image": [{"bytes": path.read_bytes(), "path": None} for path in paths],
        "file": list(pyarrow.array([str(path) for path in paths])),
    }


@pytest.mark.parametrize("column", ["path", "bytes", "image", "file"])
def test_a_batch(checkpoint: Path, pictures: Path, expected: dict[str, torch.Tensor], column: str) -> None:
    batch = {column: columns_of(pictures)[column], "n": list(range(COUNT))}
    found = fusedvit.Embedder(checkpoint, dtype=torch.float32)(batch)
    assert found["n"] == batch["n"] and found[column] == batch[column]
    assert [PREFIX not in error for error in found["error"] if error] == [True] and found["error"][5]
    assert np.isnan(found["embedding"][5]).all() and found["grid_thw"][5] == [0, 0, 0]
    for i in set(range(COUNT)) - {5}:
        close(found["embedding"][i], expected[f"{i:02d}.png"][:, : TINY["out_hidden_size"]].mean(0))


@pytest.mark.parametrize("shape, broken", [((3,), (3,)), ((1, 3), (0, 3)), ((2, 3), (0, 3))])
def test_shapes_of_encode(model: Any, pictures: Path, shape: tuple[int, ...], broken: tuple[int, ...]) -> None:
    """A vector an image, or several, of which one may be alone: errors have the same kind."""
    embedder = embedder_by(model, lambda m, p, images: [torch.ones(shape)] * len(images))
    found = embedder({"path": columns_of(pictures)["path"]})
    assert [each.shape for each in found["embedding"]] == [broken if i == 5 else shape for i in range(COUNT)]
    assert [PREFIX not in error for error in found["error"] if error] == [True] and found["error"][5]


@pytest.mark.parametrize(
    "value, said",
    [
        (np.zeros((40, 50), np.uint8), r"got uint8 [40, 50]"),
        (np.zeros((40, 50, 4), np.uint8), r"got uint8 [40, 50, 4]"),
        (np.zeros((40, 50, 3), np.float32), r"got float32 [40, 50, 3]"),
        (np.zeros((0, 50, 3), np.uint8), r"got uint8 [0, 50, 3]"),
        (None, "expected, got NoneType"),
        (7, "expected, got int"),
        (b"", "an empty file"),
        (Image.open(io.BytesIO(SAMPLE_IMAGE.read_bytes()[:3000])), "does not decode"),
    ],
)
def test_values_that_are_no_images(checkpoint: Path, pictures: Path, value: Any, said: str) -> None:
    good = (pictures / "00.png").read_bytes()
    found = fusedvit.Embedder(checkpoint)({"image": [value, good]})
    assert said in found["error"][0] and found["error"][1] == "" and np.isfinite(found["embedding"][1]).all()


@pytest.mark.parametrize("output", ["mean", "tokens"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_answers_that_are_not_finite_are_errors(model: Any, pictures: Path, output: str, value: float) -> None:
    """Of every picture, by a bias; the one that does not decode keeps its own error."""
    with torch.no_grad():
        merger = model.model.visual.merger
        merger.linear_fc2.bias[1] = value
        merger.linear_fc2.weight[1] = value if value == 3e38 else 0.0
    found = fusedvit.Embedder(model, tiny_processor(), output=output)({"path": columns_of(pictures)["path"]})
    for i, (rows, error, grid) in enumerate(zip(found["embedding"], found["error"], found["grid_thw"], strict=True)):
        assert ("does not decode" if i == 5 else "no finite embedding") in error and grid == [0, 0, 0]
        assert len(rows) == 0 if output == "tokens" else np.isnan(rows).all()


@pytest.mark.parametrize("shape", [(3,), (1, 3), (4, 3)])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_encode_returns_may_not_be_finite(
    model: Any, pictures: Path, shape: tuple[int, ...], value: float
) -> None:
    """Of two among twenty; the others go on."""

    def encode(model: Any, processor: Any, images: list[Any]) -> list[torch.Tensor]:
        return [torch.full(shape, value if image.size == (9, 9) else 1.0) for image in images]

    images = [np.zeros((9, 9, 3) if i in (2, 18) else (40, 50, 3), np.uint8) for i in range(20)]
    found = embedder_by(model, encode)({"image": images})
    assert [i for i, error in enumerate(found["error"]) if "no finite embedding" in error] == [2, 18]
    assert all(np.isfinite(found["embedding"][i]).all() for i in set(range(20)) - {2, 18})


def mean_of(model: Any, processor: Any, images: list[Any]) -> torch.Tensor:
    """An `encode`: the mean of an image's tokens."""
    given = processor(images=images, return_tensors="pt")
    rows = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"]).pooler_output
    counts = (given["image_grid_thw"].prod(1) // 4).tolist()
    return torch.stack([part.mean(0) for part in rows.split(counts)])


def test_what_encode_refuses(checkpoint: Path, model: Any, pictures: Path, expected: dict[str, torch.Tensor]) -> None:
    """Among 40 images, more than are decoded ahead of a call: rows with errors, and the others as they were."""
    thin, video = np.zeros((1, 300, 3), np.uint8), np.zeros((4, 40, 40, 3), np.uint8)
    batch = {"image": [(pictures / f"{i % 5:02d}.png").read_bytes() for i in range(100)]}
    for row, value in ((3, thin), (17, video), (50, b"x"), (99, thin)):
        batch["image"][row] = value
    found = fusedvit.Embedder(model, AutoImageProcessor.from_pretrained(checkpoint), encode=mean_of)(batch)
    said = {i: error for i, error in enumerate(found["error"]) if error}
    assert said.keys() == {3, 17, 50, 99} and "a video, and encode= takes images" in said[17]
    assert all("encode= refuses it: absolute aspect ratio" in said[row] for row in (3, 99))
    for i in set(range(100)) - said.keys():
        close(found["embedding"][i], expected[f"{i % 5:02d}.png"][:, : TINY["out_hidden_size"]].mean(0))


def test_an_encode_that_refuses_by_an_error_of_ours(model: Any) -> None:
    def encode(model: Any, processor: Any, images: list[Any]) -> torch.Tensor:
        if any(image.size == (9, 9) for image in images):
            raise InputError("too small")
        return torch.ones(len(images), 3)

    images = [np.zeros((side, side, 3), np.uint8) for side in (40, 9)]
    found = embedder_by(model, encode)({"image": images})
    assert found["error"] == ["", "encode= refuses it: too small"]


def test_an_encode_that_works_for_nothing_is_named(model: Any, pictures: Path) -> None:
    def encode(model: Any, processor: Any, images: list[Any]) -> torch.Tensor:
        raise ValueError("no such prompt")

    with pytest.raises(ValueError, match="no such prompt"):
        embedder_by(model, encode)({"path": columns_of(pictures)["path"]})


@pytest.mark.parametrize(
    "returned, error, got",
    [
        (None, ValueError, "2 embeddings for as many images, got NoneType"),
        ([None, None], TypeError, "NoneType"),
        ("xy", TypeError, "str"),
        ([["a"], ["b"]], TypeError, "list"),
        (torch.ones(2, 3, dtype=torch.complex64), TypeError, "torch.complex64"),
        (torch.ones(3, 3), ValueError, "2 embeddings for as many images, got 3"),
        (torch.ones(2, 0), ValueError, r"tensors of \(0,\)"),
        (torch.ones(2), ValueError, r"got tensors of \(\)"),
        (torch.ones(2, 2, 2, 2), ValueError, r"got tensors of \(2, 2, 2\)"),
        ([torch.ones(3), torch.ones(2, 3)], ValueError, r"got tensors of \(2, 3\), \(3,\)"),
        ([torch.ones(3), torch.ones(4)], ValueError, r"got tensors of \(3,\), \(4,\)"),
    ],
)
def test_what_encode_may_not_return(model: Any, returned: Any, error: type[Exception], got: str) -> None:
    with pytest.raises(error, match=f"^fusedvit: encode must return .*{got}"):
        embedder_by(model, lambda *given: returned)({"image": [np.zeros((40, 50, 3), np.uint8)] * 2})


@pytest.mark.parametrize(
    "first, second, expected",
    [((5, 8), (8,), r"\[t, 8\] of each image, as before, got \[8\]"),
     ((8,), (1, 8), r"\[8\] of each image, as before, got \[t, 8\]"),
     ((8,), (4,), r"\[8\] of each image, as before, got \[4\]")],
)  # fmt: skip
@pytest.mark.parametrize("batches", [1, 2])
def test_an_encode_that_changes_its_answer(
    model: Any, first: tuple[int, ...], second: tuple[int, ...], expected: str, batches: int
) -> None:
    """From one of its calls to the next, of one batch or of two: nothing of an image may be lost."""
    images = [np.full((64, 64, 3), i, np.uint8) for i in range(17)]

    def encode(model: Any, processor: Any, images: list[Any]) -> torch.Tensor:
        return torch.ones(len(images), *(first if len(images) > 1 else second))

    embedder = embedder_by(model, encode)
    if batches == 2:
        assert {each.shape for each in embedder({"image": images[:16]})["embedding"]} == {first}
        images = images[16:]
    with pytest.raises(ValueError, match=f"fusedvit: encode must return {expected}"):
        embedder({"image": images})


@pytest.mark.parametrize("kind, shape", [((8,), (8,)), ((5, 8), (0, 8))], ids=str)
def test_errors_before_an_encode_has_answered(model: Any, kind: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """They are as those that come later."""
    ones = functools.partial(embedder_by, model, lambda m, p, images: torch.ones(len(images), *kind))
    (array,) = ones()({"bytes": [b"no picture"]})["embedding"]
    assert array.shape == shape and np.isnan(array).all()
    empty = ones()(pyarrow.table({"bytes": pyarrow.array([], pyarrow.binary())}))
    assert pyarrow.types.is_list(empty.schema.field("embedding").type.value_type) == (len(kind) == 2)


@pytest.mark.parametrize("output", ["mean", "tokens"])
@pytest.mark.parametrize("of", [pyarrow.Table, pyarrow.RecordBatch])
def test_an_arrow_table_keeps_its_schema(checkpoint: Path, pictures: Path, output: str, of: Any) -> None:
    """Metadata, marks and columns of one name; with rows or without, in one type."""
    fields = [
        pyarrow.field("image", pyarrow.binary(), metadata={"a": "b"}),
        pyarrow.field("n", pyarrow.int32(), nullable=False),
        pyarrow.field("twice", pyarrow.int8()),
        pyarrow.field("twice", pyarrow.int8()),
    ]
    schema = pyarrow.schema(fields, metadata={"huggingface": "{}"})
    rows = [[(pictures / "00.png").read_bytes()], [1], [2], [3]]
    embedder = fusedvit.Embedder(checkpoint, output=output)
    found = []
    for count in (1, 0):
        arrays = [pyarrow.array(row[:count], field.type) for row, field in zip(rows, fields, strict=True)]
        found.append(embedder(of.from_arrays(arrays, schema=schema)))
        assert found[-1].schema.metadata == schema.metadata
        assert [*found[-1].schema][:4] == fields and found[-1].schema.field(0).metadata == {b"a": b"b"}
    assert pyarrow.concat_tables(found).num_rows == 1
    again = embedder(found[0])  # its own columns are replaced
    assert again.schema == found[0].schema


def test_two_columns_of_one_name(checkpoint: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array([b"a"])] * 2, names=["image", "image"])
    with pytest.raises(ValueError, match="fusedvit: one column image expected, got 2"):
        fusedvit.Embedder(checkpoint)(table)


@pytest.mark.parametrize("deepstack", [False, True])
def test_tokens(checkpoint: Path, pictures: Path, expected: dict[str, torch.Tensor], deepstack: bool) -> None:
    embedder = fusedvit.Embedder(checkpoint, output="tokens", deepstack=deepstack, dtype=torch.float32)
    found = embedder({"path": columns_of(pictures)["path"]})
    assert found["embedding"][5].shape == (0, embedder.width)
    for i in set(range(COUNT)) - {5}:
        close(found["embedding"][i], expected[f"{i:02d}.png"][:, : embedder.width])


@pytest.mark.parametrize("as_value", [Image.open, lambda path: np.asarray(Image.open(path))])
def test_decoded_images_and_an_encode_of_ones_own(model: Any, pictures: Path, as_value: Any) -> None:
    paths = [path for path in sorted(pictures.glob("*.png")) if path.name != "05.png"]
    batch = {"image": [as_value(path) for path in paths]}
    own = embedder_by(model, mean_of)(batch)
    plain = fusedvit.Embedder(model, tiny_processor())(batch)
    assert own["error"] == plain["error"] == [""] * len(paths)
    for mine, theirs in zip(own["embedding"], plain["embedding"], strict=True):
        close(mine, torch.as_tensor(theirs))


@pytest.mark.parametrize(
    ("column", "as_value"),
    [
        ("path", str),
        ("path", Path),
        ("bytes", Path.read_bytes),
        ("bytes", lambda path: bytearray(path.read_bytes())),
        ("image", lambda path: {"bytes": path.read_bytes(), "path": None}),
        ("image", Image.open),
        ("image", lambda path: np.asarray(Image.open(path))),
        ("file", lambda path: pyarrow.scalar(str(path))),
    ],
)
def test_a_row_instead_of_a_batch(checkpoint: Path, pictures: Path, column: str, as_value: Any) -> None:
    """As `datasets.map` without batches gives it."""
    embedder, value = fusedvit.Embedder(checkpoint), as_value(pictures / "00.png")
    with pytest.raises(TypeError, match=f"column {column}: a list of values, one a row, expected, got one value"):
        embedder({column: value})
    for batch in ([value], (value, value)):
        found = embedder({column: batch})
        assert found["error"] == [""] * len(batch) and len(found["embedding"]) == len(batch)


def test_columns_of_arrays(checkpoint: Path) -> None:
    """Pixels `[n, H, W, 3]`, as Ray gives them, and an array of objects."""
    embedder = fusedvit.Embedder(checkpoint)
    objects = np.empty(2, object)
    objects[:] = [np.zeros((40, 50, 3), np.uint8), np.zeros((60, 50, 3), np.uint8)]
    for values in (np.zeros((2, 40, 50, 3), np.uint8), objects):
        assert embedder({"image": values})["error"] == ["", ""]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("names", [0, 1, 2, 4, 40])
@pytest.mark.parametrize("given", [list, iter])
def test_as_many_names_as_sources(model: Any, pictures: Path, own: bool, names: int, given: Any) -> None:
    embedder = embedder_by(model, mean_of if own else None)
    sources = [str(pictures / "00.png")] * 3
    with pytest.raises(ValueError, match=f"a name of each source expected, got {names} names and (more|3) sources"):
        list(embedder.embed(given(sources), [f"n{i}" for i in range(names)]))
    assert [each.id for each in embedder.embed(given(sources), ["a", "b", "c"])] == ["a", "b", "c"]


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


def table_of(pictures: Path, folder: Path, by: str) -> Path:
    """A parquet table of the pictures, several groups of rows."""
    paths = sorted(pictures.glob("*.png"))
    contents = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    columns = {
        "contents": {"id": [path.name for path in paths], "image": contents},
        "bytes": {"id": [path.name for path in paths], "bytes": [path.read_bytes() for path in paths]},
        "paths": {"path": [str(path) for path in paths]},
    }[by]
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "table.parquet", row_group_size=4)
    return folder / "table.parquet"


def read_all(out: Path) -> dict[str, shards.Embedded]:
    """Every committed row by the name of its picture; each is there once."""
    found = [each for number in sorted(shards.committed(out)) for each in shards.read(out, number)]
    by_name = {Path(each.id).name: each for each in found}
    assert len(by_name) == len(found)
    return by_name


def assert_complete(out: Path, expected: dict[str, torch.Tensor]) -> None:
    found = read_all(out)
    assert found.keys() == expected.keys() | {"05.png"} and found["05.png"].rows is None and found["05.png"].error
    for name, rows in expected.items():
        close(found[name].rows, rows[:, : TINY["out_hidden_size"]].mean(0, keepdim=True))


@pytest.mark.parametrize("given", ["folder", "list", "contents", "bytes", "paths"])
def test_the_command(pictures: Path, expected: Any, tmp_path: Path, command: list[str], given: str) -> None:
    source = pictures
    if given == "list":
        source = tmp_path / "list.txt"
        source.write_text("".join(f"{path}\n" for path in sorted(pictures.glob("*.png"))))
    elif given != "folder":
        source = table_of(pictures, tmp_path, given)
    out, written = tmp_path / "out", tmp_path / "e.json"
    command = [*command[:2], str(source), *command[3:], "--shard-size", "3", "--json", str(written)]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 1, result.output  # one picture does not decode
    assert_complete(out, expected)
    summary = json.loads(written.read_text())["summary"]
    assert (summary["shards"], summary["inputs"], summary["errors"]) == (4, COUNT, 1)
    for run in (result, again := RUNNER.invoke(app, command)):  # which input it is, whichever run has committed it
        (line,) = [line for line in run.stderr.splitlines() if "does not decode as an image" in line]
        assert "05.png: " in line and line.count("05.png") == 1
        assert [failed["shard"] for failed in json.loads(written.read_text())["failed"]] == [1]
    assert again.exit_code == 1 and "nothing left to do" in again.output
    assert f"1 of {COUNT} inputs are errors" in again.output


@pytest.mark.parametrize("gone", [[0], [1], [2], [0, 1, 2], []])
def test_errors_count_whichever_run_has_committed_them(
    pictures: Path, tmp_path: Path, command: list[str], gone: list[int]
) -> None:
    """Shard 1 holds the picture that does not decode."""
    out, written = tmp_path / "out", tmp_path / "e.json"
    command += ["--json", str(written)]
    assert RUNNER.invoke(app, command).exit_code == 1
    for number in gone:
        shutil.rmtree(out / f"shard-{number:05d}")
    assert RUNNER.invoke(app, command).exit_code == 1
    document = json.loads(written.read_text())
    summary, kept = document["summary"], {0, 1, 2} - set(gone)
    assert (summary["shards"], summary["inputs"], summary["errors"]) == (3, COUNT, 1)
    assert summary["others"]["shards"] == len(kept) and summary["others"]["errors"] == (1 in kept)
    assert sorted(shard["number"] for shard in document["shards"]) == gone
    (pictures / "05.png").rename(tmp_path / "05.png")
    try:
        command[3] = str(tmp_path / "whole")
        assert [RUNNER.invoke(app, command).exit_code for _ in range(2)] == [0, 0]
    finally:
        (tmp_path / "05.png").rename(pictures / "05.png")


def test_files_that_are_left_out_are_said(checkpoint: Path, pictures: Path, tmp_path: Path) -> None:
    """Also where the job fails."""
    given, written = tmp_path / "given", tmp_path / "e.json"
    given.mkdir()
    shutil.copy(pictures / "00.png", given / "a.png")
    Image.open(pictures / "01.png").save(given / "b.jfif", "JPEG")
    for name in ("c.heic", "d.heic", "notes.txt", "e"):
        (given / name).write_bytes(b"x")
    command = ["embed", str(checkpoint), str(given), str(tmp_path / "out"), "--json", str(written)]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    summary = json.loads(written.read_text())["summary"]
    assert summary["inputs"] == 2 and summary["left_out"] == {".heic": 2, ".txt": 1, "": 1}
    command[1] = str(tmp_path / "absent")
    for code, said in ((0, result.output), (2, RUNNER.invoke(app, command).output)):
        assert "left out of folders, by suffix: '.heic' 2, none 1, '.txt' 1" in said, code


def test_a_tower_that_runs_its_original_code_is_told(command: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None):
        result = RUNNER.invoke(app, command)
    assert result.exit_code in (0, 1), result.output
    assert "runs its original code: hooks" in caplog.text


def other_weights(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bias of the tower, by a thousandth; the file is as large, and its head the same."""
    file = given / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "visual" in name and name.endswith("bias"))
    save_file({n: t + 1e-3 * (n == name) for n, t in tensors.items()}, file, metadata={"format": "pt"})


def other_table(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [path.read_bytes() for path in sorted((given / "pictures").glob("*.png"))]
    pyarrow.parquet.write_table(pyarrow.table({"image": contents[::-1]}), given / "t.parquet")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_weights, "the checkpoint's weights that it was begun with"),
        (lambda given, _: tiny_processor(32).save_pretrained(given / "model"), "the processor's settings that"),
        (other_table, "the tables that it was begun with"),
        (lambda given, patch: patch.chdir(shutil.copytree(given, given / "b")), "working_directory was"),
        (
            lambda given, patch: patch.setattr(corpus_job, "default_dtype", lambda on: torch.float16),
            "and is float16",
        ),
    ],
)
def test_a_job_goes_on_from_what_it_was_begun_with(
    checkpoint: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    given, out = tmp_path / "given", tmp_path / "out"
    shutil.copytree(checkpoint, given / "model")
    shutil.copytree(pictures, given / "pictures")
    other_table(given, monkeypatch)
    table = pyarrow.parquet.read_table(given / "t.parquet")
    pyarrow.parquet.write_table(table.take(list(range(COUNT))[::-1]), given / "t.parquet")
    monkeypatch.chdir(given)
    command = ["embed", str(given / "model"), "pictures", "t.parquet", str(out), "--shard-size", "6"]
    assert RUNNER.invoke(app, command).exit_code == 1
    shutil.rmtree(out / "shard-00001")  # as if killed before it
    change(given, monkeypatch)
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 2 and "holds another job" in result.output and said in result.output, result.output
    assert 1 not in shards.committed(out)


def test_a_damaged_shard_is_no_shard_that_is_done(command: list[str], tmp_path: Path) -> None:
    """Nothing is lost unsaid; what is committed beside it stays."""
    out = tmp_path / "out"
    assert "patches/s" in RUNNER.invoke(app, command).output
    damaged = out / "shard-00001" / shards.INDEX
    damaged.write_bytes(damaged.read_bytes()[:30])
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 2 and "shard-00001: does not read" in result.output, result.output
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    shutil.rmtree(damaged.parent)
    assert "embedded into" in RUNNER.invoke(app, command).output
    assert len(read_all(out)) == COUNT


def test_killed_and_resumed(
    checkpoint: Path, pictures: Path, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """`kill -9` once a first shard is there, of the next process SIGTERM, which leaves nothing behind; then it is let
    be."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fusedvit", "embed", checkpoint, pictures, out, "--shard-size", "1", *IN_FP32]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for sent, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)):
        least = len(shards.committed(out)) + 1  # one of its own: by then it handles signals
        process = subprocess.Popen([str(part) for part in command], env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while process.poll() is None and len(shards.committed(out)) < least and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(sent)
        assert process.wait() == code and len(shards.committed(out)) >= least
        read_all(out)
    assert not list(out.glob(".*"))
    assert RUNNER.invoke(app, ["embed", *map(str, command[4:])]).exit_code in (0, 1)
    assert_complete(out, expected)


def test_a_resume_in_other_batches(
    expected: Any, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are numbers of inputs: which images share a batch moves no row, and changes none by more than rounding."""
    out = tmp_path / "out"
    for gone, decoded_bytes in (((), 1), ((0, 2), 2**27), ((1,), 3 * 2 * 150 * 150)):
        for number in gone:
            shutil.rmtree(out / f"shard-{number:05d}")
        monkeypatch.setattr(streaming, "_DECODED_BYTES", decoded_bytes)
        before = {path: path.read_bytes() for path in out.rglob("*.safetensors")}
        result = RUNNER.invoke(app, command)
        assert result.exit_code == 1 and "embedded into" in result.output  # one picture does not decode
        assert all(path.read_bytes() == content for path, content in before.items())
        assert_complete(out, expected)
        assert [len(shards.read(out, number)) for number in sorted(shards.committed(out))] == [4, 4, 3]


def test_a_process_a_gpu(checkpoint: Path, pictures: Path, expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Two processes, both on the CPU. One that finds other inputs than its parent, or no parent, ends."""
    given = tmp_path / "given"
    shutil.copytree(pictures, given)
    job = corpus_job.Job(str(checkpoint), (str(given),), str(tmp_path / "out"), shard_size=2, device="cpu")
    done = []
    corpus_job.run(job, [0, 1], embedder_of, lambda shard, total: done.append(shard.number))
    assert sorted(done) == list(range((COUNT + 1) // 2))
    assert_complete(tmp_path / "out", expected)

    with worker_of(job) as alone:
        assert json.loads(alone.stdout.readline()) == {"next": True}
        alone.stdin.close()
        assert alone.wait(timeout=60) == 2
    shutil.copy(given / "00.png", given / "new.png")
    with worker_of(job) as other:
        assert f"inputs was {COUNT} and is {COUNT + 1}" in json.loads(other.stdout.readline())["error"]
        assert other.wait(timeout=60) == 2


def worker_of(job: corpus_job.Job) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", corpus_job.WORKER, json.dumps(asdict(job))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_path_that_cannot_be_reached_is_a_row(checkpoint: Path, pictures: Path, tmp_path: Path) -> None:
    """As a missing file is; the others go on."""
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join([str(pictures / "00.png"), "x" * 300 + ".png", "gone.png"]))
    job = corpus_job.Job(str(checkpoint), (str(listed),), str(tmp_path / "out"))
    (done,) = run(job).shards
    assert (done.inputs, done.errors) == (3, 2)
    good, long, gone = shards.read(tmp_path / "out", 0)
    assert not good.error and "File name too long" in long.error and "no such file" in gone.error


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("at", [0, 1, 9, 30])
def test_what_came_before_an_error_of_the_sources(model: Any, pictures: Path, own: bool, at: int) -> None:
    embedder = embedder_by(model, mean_of if own else None)

    def given() -> Any:
        yield from [(pictures / "00.png").read_bytes()] * at
        raise InputError("the table ends")

    found = []
    with pytest.raises(InputError, match="the table ends"):
        for each in embedder.embed(given()):
            found.append(each.id)
    assert found == [str(i) for i in range(at)]


@pytest.mark.parametrize("damaged", [1, 2, 4])
def test_shards_before_what_does_not_read_are_committed(
    checkpoint: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    """A group of rows is a shard."""
    table, out = tmp_path / "t.parquet", tmp_path / "out"
    content = (pictures / "00.png").read_bytes()
    pyarrow.parquet.write_table(
        pyarrow.table({"image": [content] * 20}), table, row_group_size=4, use_dictionary=False, compression="zstd"
    )
    chunk = pyarrow.parquet.read_metadata(table).row_group(damaged).column(0)
    data = bytearray(table.read_bytes())
    data[chunk.data_page_offset : chunk.data_page_offset + chunk.total_compressed_size] = (
        b"\xff" * chunk.total_compressed_size
    )
    table.write_bytes(data)
    result = RUNNER.invoke(app, ["embed", str(checkpoint), str(table), str(out), "--shard-size", "4"])
    assert result.exit_code == 2 and "no parquet file that reads" in result.output, result.output
    assert shards.committed(out) == set(range(damaged))


def test_a_shard_that_another_job_has_committed_is_not_reported(
    tmp_path: Path, job: corpus_job.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = shards.commit

    def after_another(out: Path, number: int, *others: Any) -> bool:
        return commit(out, number, *others) and (number != 1 or commit(out, number, *others))

    monkeypatch.setattr(shards, "commit", after_another)
    heard: list[int] = []
    found = corpus_job.run(job, [], embedder_of, lambda shard, total: heard.append(shard.number))
    assert heard == [shard.number for shard in found.shards] and sorted(heard) == [0, 2]
    assert found.others == {"shards": 1, "inputs": 4, "errors": 1}
    assert shards.committed(tmp_path / "out") == {0, 1, 2}


def test_what_another_run_has_committed_is_not_reported_on_ray(
    job: corpus_job.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actors, one after another in this process; another run is faster with the first shard."""
    theirs: list[int] = []

    def in_this_process(job: corpus_job.Job, parts: Any, todo: list[int], resources: Any, heard: Any) -> None:
        corpus_job.work(embedder_of(job), parts, Path(job.out), iter([0]), lambda shard: theirs.append(shard.number))
        decoder, tower = on_ray._Decoder(job.model), on_ray._Tower(job)
        for number in todo:
            heard(tower(decoder({"number": number, "given": pickle.dumps(parts[number])})))

    monkeypatch.setattr(on_ray, "_run", in_this_process)
    heard: list[dict[str, Any]] = []
    found = on_ray.embed(job, gpus=0, done=heard.append)
    assert theirs == [0] and found == heard
    assert sorted(map(str, found)) == [
        str({"number": n, "inputs": m, "errors": int(n == 1)}) for n, m in ((1, 4), (2, 3))
    ]


@pytest.mark.parametrize(
    "job, arguments, said",
    [
        ({"output": "nope"}, {}, "output: one of mean, tokens expected, got 'nope'"),
        ({"shard_size": 0}, {}, "shard_size: a whole number of at least 1 expected, got 0"),
        ({"deepstack": "no"}, {}, "deepstack: True or False expected, got 'no'"),
        ({"given": "pictures"}, {}, "given: several folders, files, lists or tables expected, got 'pictures'"),
        ({"given": (3,)}, {}, "given: a path or name expected, got 3"),
        ({"out": ""}, {}, "out: a path or name expected, got ''"),
        ({"out": os.fsdecode(b"out\xff")}, {}, "out: a folder whose path is UTF-8 expected"),
        ({}, {"actors": 0}, "actors: a whole number of at least 1 expected, got 0"),
        ({}, {"decoders": 1.5}, "decoders: a whole number of at least 1 expected, got 1.5"),
        ({}, {"gpus": -1}, "gpus: 0 for a CPU, a part of a GPU or a whole number of them expected, got -1"),
        ({}, {"gpus": "all"}, "gpus: 0 for a CPU, a part of a GPU or a whole number of them expected, got 'all'"),
    ],
    ids=str,
)
def test_options_of_a_job_that_are_none(
    checkpoint: Path, pictures: Path, tmp_path: Path, job: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    """Before there is a folder, or an actor of Ray's."""
    given: dict[str, Any] = {"model": str(checkpoint), "given": (str(pictures),), "out": str(tmp_path / "out")}
    with pytest.raises(InputError, match=re.escape(said)):
        on_ray.embed(corpus_job.Job(**given | job), **{"gpus": 0} | arguments)
    assert not (tmp_path / "out").exists()


def test_a_job_in_a_folder_that_is_not_utf_8(
    checkpoint: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads on from it can be opened here; actors of Ray's are given whole paths."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/in\xff"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    job = corpus_job.Job(str(checkpoint), (str(pictures),), "out", device="cpu")
    with pytest.raises(InputError, match="out: a folder whose path is UTF-8 expected"):
        on_ray.embed(job, gpus=0)
    assert len(run(job).shards) == 1
    assert len(shards.read(Path("out"), 0)) == 11


def test_a_job_of_paths(checkpoint: Path, pictures: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": checkpoint, "given": [pictures], "out": tmp_path / "out"}
    job = corpus_job.Job(**given, shard_size=4)
    assert job == corpus_job.Job(str(checkpoint), (str(pictures),), str(tmp_path / "out"), shard_size=4)
    assert len(run(job).shards) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, InputError])
@pytest.mark.parametrize("step", ["build", "_bytes_of", "work"])
def test_a_job_that_ends_without_a_shard_keeps_nobody_out(
    tmp_path: Path, job: corpus_job.Job, monkeypatch: pytest.MonkeyPatch, step: str, error: type
) -> None:
    """Whoever ends it; one that was there before stays."""

    def ends(*args: Any) -> Any:
        raise error("here")

    with monkeypatch.context() as patched:
        if step != "build":
            patched.setattr(corpus_job, step, ends)
        for other in (False, True):
            if other:
                shards.start(tmp_path / "out", job.document(collect(job.given), torch.float32))
            with pytest.raises(error, match="here"):
                run(job, [], ends if step == "build" else embedder_of)
            assert [path.name for path in (tmp_path / "out").iterdir()] == [shards.JOB] * other


def test_an_input_is_named_once() -> None:
    for name, error, said in (
        ("a/b.png", "a/b.png: bad", "a/b.png: bad"),
        ("b.png", "/pictures/b.png: bad", "b.png: bad"),
        ("b.png", "b.png: bad", "b.png: bad"),
        ("b.png", "bytes 1: bad", "b.png: bytes 1: bad"),
        ("b.png", "/pictures/ab.png: bad", "b.png: /pictures/ab.png: bad"),
        ("x: y.png", "p/x: y.png: bad", "x: y.png: bad"),
        ("", "bad: of", ": bad: of"),
    ):
        assert embed._named_once(name, error) == said


@pytest.mark.parametrize("committed", [0, 1, 2, 3])
def test_a_start_that_fails_while_another_is_at_work(tmp_path: Path, job: corpus_job.Job, committed: int) -> None:
    """On a new folder, where the other has committed some of its shards, and ended or not."""
    done: list[int] = []

    def failing(given: corpus_job.Job) -> Any:
        raise InputError("model does not load on this host")

    def another(shard: corpus_job.ShardDone, total: int) -> None:
        done.append(shard.number)
        if len(done) == committed:
            raise KeyboardInterrupt

    def build(given: corpus_job.Job) -> Any:
        if committed:
            with contextlib.suppress(KeyboardInterrupt):
                corpus_job.run(job, [], embedder_of, another)
        else:  # it is at work, and fails here; the first one goes on
            with pytest.raises(InputError, match="does not load"):
                corpus_job.run(job, [], failing, another)
            return embedder_of(given)
        raise InputError("model does not load on this host")

    if committed:
        with pytest.raises(InputError, match="does not load"):
            run(job, [], build)
    else:
        run(job, [], build)
    assert (tmp_path / "out" / shards.JOB).is_file()
    run(job)
    assert shards.committed(tmp_path / "out") == {0, 1, 2}
    assert {path.name for path in (tmp_path / "out").glob(".*")} == set()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["only-one"], "one INPUT or more, and OUT expected, got 'model' 'only-one'"),
        (["a", "b", "--output", "max"], "one of mean, tokens"),
        (["a", "b", "--gpus", "7"], "numbers below|no GPU here"),
        (["a", ""], "OUT expected, got 'model' 'a' ''"),
        (["a", "b", "--gpus", "0", "--device", "cpu"], "give one of them"),
        (["a", "b", "--device", "tpu9"], "--device must be"),
        (["absent", "b"], "no such file or folder"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = RUNNER.invoke(app, ["embed", "model", *arguments])
    assert result.exit_code == 2
    assert any(part in result.output for part in message.split("|")), result.output


def test_a_mistyped_model_keeps_nobody_out(checkpoint: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = RUNNER.invoke(app, ["embed", str(tmp_path / "absent"), str(pictures), str(out)])
    assert result.exit_code == 2 and "no such folder" in result.output
    assert not out.exists() or list(out.iterdir()) == []
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    os.truncate(broken / "model.safetensors", 5000)
    job = corpus_job.Job(str(broken), (str(pictures),), str(out))
    for gpus in ([], [0]):
        with pytest.raises(InputError, match="no whole safetensors file"):
            run(job, gpus, embedder_of)
        assert list(out.iterdir()) == []
    job = corpus_job.Job(str(tmp_path / "absent"), (str(pictures),), str(out))
    with pytest.raises(InputError, match="no such folder"):
        run(job, [0], embedder_of)
    assert not out.exists() or list(out.iterdir()) == []


def test_a_process_that_dies_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SIGCHLD is ignored every process seems to have ended well."""
    command = ["sh", "-c", """echo '{"next": true}'; read number; exit 0"""]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    monkeypatch.setattr(corpus_job, "_started", lambda job, gpu: subprocess.Popen(command, **pipes))
    job = corpus_job.Job("a model", ("a",), str(tmp_path))
    with pytest.raises(InputError, match="the process on GPU 0 died"):
        corpus_job._run_on(job, [0], [0], lambda shard: None)
    corpus_job._run_on(job, [0], [], lambda shard: None)
