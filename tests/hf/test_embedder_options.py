"""What `Embedder` refuses when it is built, and what it takes as a batch or as sources."""

import functools
import importlib
import io
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402

import fusedvit  # noqa: E402
from fusedvit.checkpoint import load_tower  # noqa: E402
from fusedvit.checks import fallback  # noqa: E402
from fusedvit.corpus import inputs, loading, shards  # noqa: E402
from fusedvit.corpus import job as corpus_job  # noqa: E402
from fusedvit.corpus.embedder import embedder_of  # noqa: E402
from fusedvit.errors import InputError, UnsupportedModel  # noqa: E402
from fusedvit.pixels.media import MediaError, load_one  # noqa: E402
from fusedvit.pixels.streaming import stream  # noqa: E402
from tests.support.checkpoint import checkpoint, pictures, tiny_processor, whole_model  # noqa: E402

__all__ = ["checkpoint", "pictures"]  # fixtures
PICTURES = 4, (40, 80), "03.png"
VIDEO = np.zeros((4, 64, 64, 3), np.uint8)


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"device": "tpu"}, ValueError, "device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        ({"device": "cuda:99"}, ValueError, "device must be the CPU or one of"),
        ({"device": "meta"}, ValueError, "device must be the CPU or one of"),
        ({"device": 0}, TypeError, "device: cpu, cuda or cuda:N expected, got int"),
        ({"dtype": "fp16"}, TypeError, "dtype: a torch.dtype expected, got str"),
        ({"dtype": torch.int8}, ValueError, "dtype: one of .* expected, got torch.int8"),
        ({"threads": 0}, ValueError, "threads must be at least 1, got 0"),
        ({"threads": "a"}, TypeError, "threads must be an int, got str"),
        ({"threads": True}, TypeError, "threads must be an int, got bool"),
        ({"limits": 5}, TypeError, "limits must be Limits or None, got int"),
        ({"config": {}}, TypeError, "config: FuseConfig or None expected, got dict"),
        ({"deepstack": "yes"}, TypeError, "deepstack: True or False expected, got str"),
        ({"processor": 5}, TypeError, "processor: an image processor, or what holds one expected, got int"),
        ({"processor": len}, UnsupportedModel, "cannot give bytes"),
        ({"output": "max"}, ValueError, "'mean', 'tokens'"),
        ({"encode": lambda *given: None}, TypeError, "a model that is loaded"),
        ({"encode": 5}, TypeError, r"encode: a function \(model, processor, images\) expected, got int"),
    ],
)
def test_options_are_checked_when_it_is_built(
    checkpoint: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"fusedvit: .*{said}"):
        fusedvit.Embedder(checkpoint, **options)


def test_a_forward_of_the_towers_own_is_told_of_once(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    tower = load_tower(str(checkpoint), torch.device("cpu"), torch.float32)
    tower.forward = functools.partial(type(tower).forward, tower)
    fusedvit.Embedder(tower, tiny_processor())
    assert [fallback.BYPASSED in r.getMessage() for r in caplog.records if r.name == "fusedvit"] == [True]


def test_its_handle_and_its_repr(checkpoint: Path) -> None:
    embedder = fusedvit.Embedder(checkpoint, output="tokens")
    assert isinstance(embedder.handle, fusedvit.FusedEncoder)
    said = f"<Embedder of Qwen3VLVisionModel: tokens, {embedder.width} channels; <FusedEncoder of "
    assert repr(embedder).startswith(said)
    own = fusedvit.Embedder(embedder.handle.tower, tiny_processor(), encode=lambda *given: [])
    assert repr(own).startswith("<Embedder of Qwen3VLVisionModel: rows of encode; <FusedEncoder")


def test_models_that_are_none(checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="fusedvit: model: a checkpoint's folder or hub name, or a model expected"):
        fusedvit.Embedder(None)  # type: ignore[arg-type]
    model = whole_model(checkpoint)
    with pytest.raises(TypeError, match="fusedvit: device= and dtype= are a checkpoint's"):
        fusedvit.Embedder(model, tiny_processor(), device="cpu")


@pytest.mark.parametrize("as_one", [str, Path, Path.read_bytes, lambda path: np.zeros((40, 50, 3), np.uint8)])
def test_one_source_alone(checkpoint: Path, pictures: Path, as_one: Any) -> None:
    embedder, one = fusedvit.Embedder(checkpoint), as_one(pictures / "00.png")
    (found,), (wanted,) = list(embedder.embed(one, ["a"])), list(embedder.embed([one], ["a"]))
    assert found.error == "" and torch.equal(found.rows, wanted.rows)
    with pytest.raises(TypeError, match="fusedvit: sources must be .*, got int"):
        embedder.embed(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fusedvit: names: .* expected, got str$"):
        embedder.embed([one], "a")
    names = np.array([str(pictures / "00.png")] * 2)
    assert [each.error for each in embedder.embed(names)] == ["", ""]


@pytest.mark.parametrize("names", [None, ["a", "b"]])
def test_sources_are_iterated_once(checkpoint: Path, pictures: Path, names: list[str] | None) -> None:
    begun = []

    class Loader(list[Path]):
        def __iter__(self) -> Iterator[Path]:
            begun.append(self)
            return super().__iter__()

    found = fusedvit.Embedder(checkpoint).embed(Loader([pictures / "00.png"] * 2), names)
    assert [each.error for each in found] == ["", ""] and len(begun) == 1


@pytest.mark.parametrize(
    "batch, said",
    [
        ({"path": None}, "column path: a list of values, one a row, expected, got NoneType"),
        (5, "a dictionary of columns, a pandas frame or an Arrow table expected, got int"),
        ([{"path": "a"}], "a dictionary of columns, .* expected, got list"),
    ],
)
def test_batches_that_are_none(checkpoint: Path, batch: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"fusedvit: {said}"):
        fusedvit.Embedder(checkpoint)(batch)


@pytest.mark.parametrize("output", ["mean", "tokens"])
@pytest.mark.parametrize("kind", [pyarrow.Table, pyarrow.RecordBatch])
def test_arrow_tables(checkpoint: Path, pictures: Path, output: str, kind: Any) -> None:
    """They come back as such, other columns as they were; a column of an earlier run is replaced."""
    contents = [path.read_bytes() for path in sorted(pictures.glob("*.png"))]
    times = pyarrow.array(range(4), pyarrow.timestamp("ns"))
    batch = kind.from_arrays([pyarrow.array(contents), times, times], names=["bytes", "at", "error"])
    embedder = fusedvit.Embedder(checkpoint, output=output)
    found, wanted = embedder(batch), embedder({"bytes": contents})
    assert found.column_names == ["bytes", "at", "embedding", "grid_thw", "error"]
    assert found["at"].combine_chunks() == times and found["bytes"].to_pylist() == contents
    assert found["error"].to_pylist() == wanted["error"] and found["grid_thw"].to_pylist() == wanted["grid_thw"]
    for mine, theirs in zip(found["embedding"].to_pylist(), wanted["embedding"], strict=True):
        shaped = np.asarray(mine, np.float32).reshape(theirs.shape)
        np.testing.assert_array_equal(shaped, theirs)


class Tensor:
    """A value of Ray's tensor columns in a pandas frame."""

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels

    def to_numpy(self) -> np.ndarray:
        return self._pixels


@pytest.mark.parametrize("kind", [pyarrow.Table, pyarrow.RecordBatch])
def test_pixels_in_tensor_columns(checkpoint: Path, kind: Any) -> None:
    """Arrow's, and Ray's in frames; pixels of another dtype, and none, are errors of their rows."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 64, 48, 3), dtype=np.uint8)
    embedder = fusedvit.Embedder(checkpoint)
    wanted = embedder({"image": list(pixels)})["embedding"]
    column = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    found = embedder(kind.from_arrays([column], names=["image"]))
    assert found["error"].to_pylist() == [""] * 3 and found["image"].type == column.type
    np.testing.assert_allclose(np.stack(found["embedding"].to_pylist()), np.stack(wanted), atol=1e-5)
    as_frame = embedder({"image": list(map(Tensor, pixels))})
    assert as_frame["error"] == [""] * 3 and np.array_equal(as_frame["embedding"], wanted)

    floats = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(pixels.astype(np.float32))
    assert "uint8 pixels" in embedder(kind.from_arrays([floats], names=["image"]))["error"][0].as_py()
    rows = pyarrow.array([pixels[0].ravel(), None], column.type.storage_type)
    found = embedder(kind.from_arrays([pyarrow.ExtensionArray.from_storage(column.type, rows)], names=["image"]))
    first, second = found["error"].to_pylist()
    assert first == "" and "does not convert: Cannot convert data with nulls" in second


class Pickled(pyarrow.ExtensionType):
    """As Ray defines it for columns of Pillow images, and of arrays beside None."""

    def __init__(self) -> None:
        super().__init__(pyarrow.large_binary(), "ray.data.arrow_pickled_object")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""


def test_pickled_objects_in_tables_are_named(checkpoint: Path, pictures: Path) -> None:
    rows = pyarrow.array([pickle.dumps(pictures / "00.png"), None], pyarrow.large_binary())
    column = pyarrow.ExtensionArray.from_storage(Pickled(), rows)
    first, second = fusedvit.Embedder(checkpoint)(pyarrow.table({"image": column}))["error"].to_pylist()
    assert 'does not convert: a pickled object of Ray\'s; with batch_format="numpy"' in first
    assert "expected, got NoneType" in second


def test_one_error_as_several_sources(checkpoint: Path, pictures: Path) -> None:
    error = MediaError("absent")
    found = list(fusedvit.Embedder(checkpoint).embed([error, pictures / "00.png", error, error]))
    assert [each.error for each in found] == ["absent", "", "absent", "absent"]


def ones(model: Any, processor: Any, images: Any) -> torch.Tensor:
    return torch.ones(len(images), 3)


@pytest.mark.parametrize("encode", [None, ones])
def test_calls_do_not_change_what_is_pickled(checkpoint: Path, pictures: Path, encode: Any) -> None:
    """`datasets` finds results in its cache by a hash of it; a copy counts from zero."""
    embedder = fusedvit.Embedder(whole_model(checkpoint), tiny_processor(), encode=encode)
    before = _hashed(embedder)
    assert before == _hashed(embedder)
    list(embedder.embed(sorted(pictures.glob("*.png"))))
    assert before == _hashed(embedder)
    if encode is None:
        copied = pickle.loads(pickle.dumps(embedder))
        assert embedder.counters()["patches"] > 0 == copied.counters()["patches"]
        assert next(copied.embed(pictures / "00.png")).error == ""


def _hashed(value: Any) -> list[Any]:
    """What pickle takes from an object, in order: values, and the names of objects' attributes."""
    seen: list[Any] = []

    class Taken(pickle.Pickler):
        def persistent_id(self, each: Any) -> None:
            if isinstance(each, str | int | float | bool | None):
                seen.append(each)

    Taken(io.BytesIO()).dump(value)
    return seen


def test_of_several_columns_the_command_and_the_class_read_the_same(
    checkpoint: Path, pictures: Path, tmp_path: Path
) -> None:
    read, other = (path.read_bytes() for path in sorted(pictures.glob("*.png"))[:2])
    table = pyarrow.table({"path": ["absent.png"], "bytes": [other], "image": [read]})
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    assert list(inputs.sources(inputs.collect([tmp_path / "table.parquet"]))) == [read]
    embedder = fusedvit.Embedder(checkpoint)
    found, wanted, others = (embedder(batch)["embedding"] for batch in (table, {"bytes": [read]}, {"bytes": [other]}))
    assert found[0].as_py() == wanted[0].tolist() != others[0].tolist()


def test_a_column_that_is_none_is_not_told_in_its_content(checkpoint: Path) -> None:
    for batch in (pyarrow.table({"x": [b"content"]}), {"x": [1]}):
        with pytest.raises(ValueError, match=r"a column of .* expected, got \['x'\]"):
            fusedvit.Embedder(checkpoint)(batch)


# ── packages that are missing ─────────────────────────────────────────────────────────────────────────────────────────


def video_file(path: Path) -> Path:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for frame in VIDEO:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return path


def without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(where: str) -> Any:
        raise ImportError("AutoVideoProcessor requires the Torchvision library but it was not found. More of it.")

    package = sys.modules["transformers"]  # that imports find: transformers puts another one there as it loads a model
    monkeypatch.setattr(package, "AutoVideoProcessor", SimpleNamespace(from_pretrained=missing))


@pytest.mark.parametrize("package", ["torchvision", "av"])
def test_a_package_that_is_missing_is_no_error_of_a_video(
    checkpoint: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """Nothing of it is committed, what is before it is."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes((pictures / "00.png").read_bytes())
    video_file(tmp_path / "in" / "b.mp4")
    without_torchvision(monkeypatch)
    if package == "av":
        monkeypatch.setitem(sys.modules, "av", None)
    job = corpus_job.Job(str(checkpoint), (str(tmp_path / "in"),), str(tmp_path / "out"), shard_size=1)
    with pytest.raises(InputError, match="pip install torchvision" if package == "torchvision" else "needs PyAV: pip"):
        corpus_job.run(job, [], embedder_of, lambda shard, total: None)
    assert 1 not in shards.committed(tmp_path / "out")


def test_frames_of_a_video_as_well(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that holds none, on the other hand, refuses the video."""
    without_torchvision(monkeypatch)
    with pytest.raises(InputError, match=r"needs a package that is missing: AutoVideoProcessor .* not found[^.]*: pip"):
        list(stream([VIDEO], loading.processors_of(str(checkpoint)), "cpu", errors="skip"))
    with pytest.raises(MediaError, match="a video, and no video processor gives bytes"):
        list(stream([VIDEO], tiny_processor(), "cpu"))


def test_a_package_that_an_image_needs(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG", transparency=(0, 0, 0))
    media = importlib.import_module("fusedvit.pixels.media")
    monkeypatch.setattr(media, "_transformers_rgb", lambda: importlib.import_module("no_such_package"))
    with pytest.raises(InputError, match="bytes 0: cannot be read .a package is missing: .*no_such_package") as met:
        load_one(file.getvalue())
    assert not isinstance(met.value, MediaError)


@pytest.mark.parametrize("where", ["./nosuch", "", "no such hub name"])
def test_checkpoints_that_do_not_load_are_named_as_ours(where: str) -> None:
    for load in (fusedvit.Embedder, lambda name: load_tower(name, torch.device("cpu"), torch.float32)):
        with pytest.raises(InputError, match="^fusedvit: ") as met:
            load(where)
        assert str(met.value).count("fusedvit: ") == 1


@pytest.mark.parametrize("encode", [None, lambda model, processor, images: torch.ones(len(images), 3)])
def test_a_failing_machine_is_named_as_ours(
    checkpoint: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, encode: Any
) -> None:
    embedder = fusedvit.Embedder(whole_model(checkpoint), tiny_processor(), encode=encode)
    opened = Path.open

    def refused(path: Path, *given: Any, **more: Any) -> Any:
        if path.suffix == ".png":
            raise PermissionError(13, "Permission denied")
        return opened(path, *given, **more)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(InputError, match="^fusedvit: .*00.png: cannot be read .Permission denied.$"):
        list(embedder.embed([pictures / "00.png"]))


@pytest.mark.parametrize(
    "names, got",
    [(5, "int"), ({"a": 1}, "dict"), ({"a"}, "set"), ([5], "list of int"), ([None, "a"], "list of NoneType")],
)
def test_names_that_are_none(checkpoint: Path, names: Any, got: str) -> None:
    with pytest.raises(TypeError, match=f"^fusedvit: names: a list of strings, .* expected, got {got}$"):
        fusedvit.Embedder(checkpoint).embed(["a.png"], names)
