"""What the command line does with what it is given: exit codes, one line in place of a traceback, JSON alone."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

import fusedvit  # noqa: E402
from fusedvit import checkpoint  # noqa: E402
from fusedvit.bench import workloads  # noqa: E402
from fusedvit.bench.towers import random_weights_  # noqa: E402
from fusedvit.cli import bench, console, demo, env, towers, verify  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.cli.console import write_file  # noqa: E402
from fusedvit.cli.media import SAMPLE_IMAGE  # noqa: E402
from fusedvit.cli.towers import TINY  # noqa: E402
from fusedvit.errors import InputError, failed_import  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RUNNER = CliRunner(env={"COLUMNS": "200"})
ROPE = {"rope_type": "default", "mrope_section": [8, 8, 8], "rope_theta": 1e4}
TEXT = {"num_hidden_layers": 1, "hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 64, "rope_parameters": ROPE}


def _run(*arguments: str | Path) -> Any:
    return RUNNER.invoke(app, list(map(str, arguments)))


def _python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


def _refused(result: Any, said: str) -> None:
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split()) and "Traceback" not in result.output
    lines = [line for line in result.output.strip().splitlines() if not re.match(r"\d+ s: ", line)]  # of progress
    assert len(lines) == 1, result.output


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Qwen3-VL with a tiny tower and a language model, in several shards."""
    config = transformers.Qwen3VLConfig(text_config=TEXT | {"head_dim": 48}, vision_config=dict(TINY))
    return _saved(transformers.Qwen3VLForConditionalGeneration(config), tmp_path_factory.mktemp("qwen3"), "200KB")


@pytest.fixture(scope="module")
def colqwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A supported tower in a model that no AutoModel class maps."""
    vision = {"depth": 2, "embed_dim": 160, "num_heads": 2, "hidden_size": 96}
    config = transformers.ColQwen2Config(vlm_config=transformers.Qwen2VLConfig(text_config=TEXT, vision_config=vision))
    return _saved(transformers.ColQwen2ForRetrieval(config), tmp_path_factory.mktemp("colqwen2"), "5GB")


def _saved(model: Any, folder: Path, shard: str) -> Path:
    random_weights_(model)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_tower_is_loaded_without_the_language_model(
    qwen3: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_whole_model", None)
    cpu, steps = torch.device("cpu"), list[str]()
    found = checkpoint.load_tower(str(qwen3), cpu, towers.DTYPES[dtype], steps.append)
    assert type(found).__name__ == "Qwen3VLVisionModel" and not found.training
    whole = transformers.Qwen3VLForConditionalGeneration.from_pretrained(qwen3, dtype=towers.DTYPES[dtype])
    expected = whole.model.visual.state_dict() | dict(whole.model.visual.named_buffers())
    loaded = found.state_dict() | dict(found.named_buffers())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert found.config._attn_implementation == whole.model.visual.config._attn_implementation


def test_verify_in_another_dtype(qwen3: Path, tmp_path: Path) -> None:
    result = _run("verify", qwen3, SAMPLE_IMAGE, "--dtype", "bf16", "--device", "cpu", "--json", tmp_path / "v.json")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert (written["dtype"], written["device"], written["passed"]) == ("torch.bfloat16", "cpu", True)


@pytest.mark.parametrize("alone", [True, False])
def test_verify_of_a_model_that_automodel_does_not_map(
    colqwen2: Path, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not alone:
        monkeypatch.setattr(checkpoint, "_tower_alone", lambda *arguments: None)
    result = _run("verify", colqwen2, SAMPLE_IMAGE, "--device", "cpu")
    assert result.exit_code == 0 and "2 of 2 outputs pass" in result.output, result.output


def test_weights_of_another_name_take_the_whole_model(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_prefix_of", lambda wanted, shards: None)
    found = checkpoint.load_tower(str(qwen3), torch.device("cpu"), torch.float32, lambda text: None)
    assert type(found).__name__ == "Qwen3VLForConditionalGeneration"


def test_a_prefix_is_unique_and_whole() -> None:
    wanted = {"a.weight", "b.weight"}
    assert checkpoint._prefix_of(wanted, {"x.a.weight": "1", "x.b.weight": "1", "y.a.weight": "1"}) == "x."
    assert checkpoint._prefix_of(wanted, {"a.weight": "1", "b.weight": "1"}) == ""
    assert checkpoint._prefix_of(wanted, {"x.a.weight": "1", "y.b.weight": "1"}) is None
    twice = {f"{at}.{name}": "1" for at in "xy" for name in wanted}
    assert checkpoint._prefix_of(wanted, twice) is None


def _no_config(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(b"")
    return "holds no config.json"


def _broken_config(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "no config that transformers reads"


def _wrong_number(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {"hidden_size": "many"}}')
    return "no config that transformers reads"


def _no_such_tower(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {"num_heads": 0}}')
    return "Qwen3VLVisionModel cannot be built from its config"


def _unknown_type(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "nothing_known"}')
    return "nothing_known"


def _llama(folder: Path) -> str:
    transformers.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return "LlamaForCausalLM holds no supported vision tower"


def _no_weights(folder: Path) -> str:
    vision = dict(TINY)
    architectures = ["Qwen3VLForConditionalGeneration"]
    transformers.Qwen3VLConfig(text_config=TEXT, vision_config=vision, architectures=architectures).save_pretrained(
        folder
    )
    return "Qwen3VLForConditionalGeneration does not load"


@pytest.mark.parametrize(
    "make", [_no_config, _broken_config, _wrong_number, _no_such_tower, _unknown_type, _llama, _no_weights]
)
def test_checkpoints_that_cannot_be_used(make: Callable[[Path], str], tmp_path: Path) -> None:
    said = make(tmp_path)
    _refused(_run("verify", tmp_path, SAMPLE_IMAGE), said)


def test_truncated_weights(colqwen2: Path, qwen3: Path, tmp_path: Path) -> None:
    for name, source in (("one", colqwen2), ("many", qwen3)):
        folder = tmp_path / name
        folder.mkdir()
        for path in source.iterdir():
            content = path.read_bytes()
            cut = path.suffix == ".safetensors"
            (folder / path.name).write_bytes(content[: len(content) // 2] if cut else content)
        _refused(_run("verify", folder, SAMPLE_IMAGE), "no whole safetensors file")
    (tmp_path / "many" / "model-00001-of-00026.safetensors").unlink(missing_ok=True)


def test_a_shard_that_is_missing(qwen3: Path, tmp_path: Path) -> None:
    index = json.loads((qwen3 / checkpoint.INDEX).read_text(encoding="utf-8"))["weight_map"]
    missing = next(shard for name, shard in index.items() if ".visual." in name)
    for path in qwen3.iterdir():
        if path.name != missing:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    _refused(_run("verify", tmp_path, SAMPLE_IMAGE), f"{missing}, which the index names, is missing")


def test_a_tower_that_the_weights_are_not_all_of(qwen3: Path, tmp_path: Path) -> None:
    """transformers fills up what is missing with random numbers."""
    for path in qwen3.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["vision_config"]["depth"] += 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = _run("verify", tmp_path, SAMPLE_IMAGE)
    assert result.exit_code == 2 and "lacks 24 of the vision tower's weights" in result.output, result.output


@pytest.mark.parametrize("value", [None, 3, [], {}], ids=str)
def test_an_index_whose_files_are_no_names(value: Any, qwen3: Path, tmp_path: Path) -> None:
    names = json.loads((qwen3 / checkpoint.INDEX).read_text(encoding="utf-8"))["weight_map"]
    (tmp_path / "config.json").write_bytes((qwen3 / "config.json").read_bytes())
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, value)}))
    _refused(
        _run("verify", tmp_path, SAMPLE_IMAGE),
        f"the name of a file expected for lm_head.weight, got {json.dumps(value)}",
    )
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "a\0b")}))
    _refused(_run("verify", tmp_path, SAMPLE_IMAGE), "which the index names, is missing")
    (tmp_path / checkpoint.INDEX).write_text("[" * 100_000)  # deeper than Python reads
    _refused(_run("verify", tmp_path, SAMPLE_IMAGE), "is no index of weights")
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": value}))
    said = "does not load" if value == {} else f"a weight_map of names to files expected, got {json.dumps(value)}"
    _refused(_run("verify", tmp_path, SAMPLE_IMAGE), said)


@pytest.mark.parametrize(
    "name, content",
    [
        ("pytorch_model.bin", b""),
        ("pytorch_model.bin", b"garbage"),
        ("pytorch_model.bin.index.json", b'{"weight_map": 3}'),
    ],
)
def test_weights_that_torch_cannot_read(name: str, content: bytes, tmp_path: Path) -> None:
    _no_weights(tmp_path)
    (tmp_path / name).write_bytes(content)
    _refused(_run("verify", tmp_path, SAMPLE_IMAGE), "whole files of weights expected, got damaged ones")


@pytest.mark.parametrize("value", [[None], [3], [[]], "Qwen3VLForConditionalGeneration", 3], ids=str)
def test_architectures_that_are_no_names(value: Any, tmp_path: Path) -> None:
    _no_weights(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": value}))
    result = _run("verify", tmp_path, SAMPLE_IMAGE)
    older = f"Field 'architectures' with value {value!r} doesn't match any type"  # older transformers' own words
    _refused(result, older if older in result.output else f"a list of names expected, got {value}")


@pytest.mark.parametrize("alone", [True, False])
def test_a_tensor_of_another_shape(qwen3: Path, tmp_path: Path, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not alone:
        monkeypatch.setattr(checkpoint, "_tower_alone", lambda *arguments: None)
    for path in qwen3.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["vision_config"]["intermediate_size"] = 288
    (tmp_path / "config.json").write_text(json.dumps(config))
    _refused(_run("verify", tmp_path, SAMPLE_IMAGE), "0.mlp.linear_fc1.bias is [280], the config expects [288]")


@pytest.mark.parametrize("given, said", [("none/at/all", "no such folder"), ("./none", "no such folder")])
def test_folders_that_are_not_there(given: str, said: str) -> None:
    _refused(_run("verify", given, SAMPLE_IMAGE), said)  # without PyAV the videos that it takes by itself are refused
    _refused(_run("demo", SAMPLE_IMAGE, "--model", given), said)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    _refused(_run("verify", "https://host/model", SAMPLE_IMAGE), "a URL")
    _refused(_run("verify", "", SAMPLE_IMAGE), "a checkpoint's folder or hub name expected, got ''")
    _refused(_run("verify", SAMPLE_IMAGE, SAMPLE_IMAGE), "a file")
    _refused(_run("verify", "mine", SAMPLE_IMAGE, "--dtype", "int8"), "bf16, fp16, fp32")
    for device in ("tpu", "nonsense", "cuda:99"):
        _refused(_run("verify", "mine", SAMPLE_IMAGE, "--device", device), "--device")


# ── media ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_media_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a tower built or read for it."""
    monkeypatch.setattr(demo, "random_tower", None)
    monkeypatch.setattr(verify, "load_tower", None)
    wide = tmp_path / "wide.png"
    Image.fromarray(np.zeros((10, 2500, 3), dtype=np.uint8)).save(wide)
    cases = {tmp_path / "none.png": "none.png: no such file", tmp_path: "a folder", "https://host/a.png": "a URL"}
    cases[wide] = f"{wide}: Hugging Face's processor refuses it"
    for given, said in cases.items():
        _refused(_run("demo", given, "--plot", tmp_path / "x.png"), said)
        _refused(_run("verify", "mine", given), said)
    assert not (tmp_path / "x.png").exists()


# ── the command itself ────────────────────────────────────────────────────────────────────────────────────────────────


def test_standard_output_is_json_alone(qwen3: Path) -> None:
    done = _python("-m", "fusedvit", "verify", str(qwen3), str(SAMPLE_IMAGE), "--device", "cpu", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True
    assert "outputs pass" in done.stderr and "Traceback" not in done.stderr
    done = _run("env", "--json", "-")
    assert json.loads(done.stdout)["verdict"] in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [["env", "--json"], ["demo", "--plot"], ["tune", "--out"], ["compile", "tiny", "--gpu", "h100", "--out"]],
    ids=" ".join,
)
def test_an_output_without_a_name(arguments: list[str]) -> None:
    result = _run(*arguments, "")
    assert result.exit_code == 2 and "a path to write to expected, got ''" in result.output


def test_options_before_a_subcommand_are_refused() -> None:
    result = _run("bench", "--json", "b.json", "--tower", "nope", "kernels", "--rows", 64)
    assert result.exit_code == 2, result.output
    assert "expected after `bench kernels`, got before it: --json, --tower" in " ".join(result.output.split())


def test_workloads_and_the_sweep() -> None:
    def chosen(**options: Any) -> set[str]:
        return set(bench._options(bench.Asked(**options), torch.device("cpu")).workloads)

    named, swept = "1 x 224 px", set(workloads.sweep())
    assert chosen(workload=["none"], rows=[64]) == set() and chosen(workload=[named]) == {named}
    assert chosen(workload=["none"], sweep=True) == swept and chosen(workload=[named], sweep=True) == swept | {named}
    assert chosen() == swept | set(workloads.WORKLOADS) and chosen(sweep=False) == set(workloads.WORKLOADS)


def test_time_that_is_left_is_told_once_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    said, now = list[str](), iter([5.0, 7.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now))
    step = console._counted(said.append)
    step("a", 1, 3)
    step("b", 2, 3)
    assert said == ["1 of 3: a", "2 of 3, 1 s left: b"]


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_what_cannot_be_written_is_refused_before_the_work(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _refused(_run("demo", option, tmp_path / "file" / "x.png"), "cannot be written (a folder expected, got a file)")
    _refused(_run("demo", option, tmp_path), "cannot be written (a folder)")
    if option == "--plot":
        _refused(_run("demo", option, tmp_path / "x.xyz"), "the suffix must be one of .png")


def test_version_and_usage() -> None:
    done = _python("-m", "fusedvit", "--version")
    assert (done.returncode, done.stdout) == (0, f"fusedvit {fusedvit.__version__}\n")
    assert _run("verify").exit_code == 2 and _run("nothing").exit_code == 2


def test_help_is_quick() -> None:
    code = (
        "import sys, atexit; from fusedvit.__main__ import main; "
        "slow = {'torch', 'triton', 'transformers', 'matplotlib', 'av', 'PIL', 'numpy'}; "
        "atexit.register(lambda: print('heavy:', slow & set(sys.modules))); sys.argv = ['fusedvit', '--help']; main()"
    )
    begin = time.perf_counter()
    done = _python("-c", code)
    assert done.returncode == 0 and "heavy: set()" in done.stdout, done.stderr
    assert "demo" in done.stdout and time.perf_counter() - begin < 10, "1 s on an idle machine"


@pytest.mark.parametrize("missing", ["typer", "rich", "PIL", "matplotlib"])
def test_without_the_cli_extra(missing: str, tmp_path: Path) -> None:
    """As if the package were not installed."""
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('No module named {missing}', name='{missing}')")
    done = _python(
        "-m", "fusedvit", "demo", "--plot", str(tmp_path / "d.png"), PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines()[-1] == f'The command needs {missing}: pip install "fusedvit[cli]"'
    assert "Traceback" not in done.stderr


NO_OPERATOR = 'raise RuntimeError("operator torchvision::nms does not exist")'
NO_LIBRARY = 'raise ImportError("libjpeg.so.9: cannot open shared object file")'


@pytest.mark.parametrize("raises", [NO_OPERATOR, NO_LIBRARY], ids=["operator", "library"])
def test_an_installed_package_that_does_not_import(raises: str, qwen3: Path, tmp_path: Path) -> None:
    """A torchvision of another torch: whatever it raises, it is no answer that differs."""
    stub, version = tmp_path / "torchvision", tmp_path / "torchvision-0.28.0.dist-info"
    stub.mkdir()
    (stub / "__init__.py").write_text(f"from torchvision import _extension\n{raises}")
    (stub / "_extension.py").write_text(raises)
    version.mkdir()
    (version / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "COLUMNS": "200"}
    why = raises.split('"')[1]
    done = _python("-m", "fusedvit", "verify", str(qwen3), **path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1] == f"torchvision does not import: {why}"
    done = _python("-m", "fusedvit", "env", **path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == f"broken: torchvision does not import ({why})"


def test_what_is_an_import_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of our own modules, and of what is called after an import, are faults to be reported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "absent_needed.py").write_text("import numpy.absent")
    (tmp_path / "raises_later.py").write_text("def called(): raise RuntimeError('later')")

    def of(text: str) -> str | None:
        try:
            exec(compile(text, "text", "exec"), {"__name__": "fusedvit.text"})
        except Exception as error:
            return failed_import(error)
        raise AssertionError("it raises nothing")

    assert of("import absent_needed") == "numpy does not import: No module named 'numpy.absent'"
    assert (of("from numpy import absent") or "").startswith("numpy does not import: cannot import name 'absent'")
    assert of("import fusedvit.absent") is None
    assert of("from fusedvit.errors import absent") is None
    assert of("import raises_later; raises_later.called()") is None


# ── the verdict of env ────────────────────────────────────────────────────────────────────────────────────────────────

GPU = {"name": "NVIDIA H200", "capability": "90", "tuning": "no tuning table: heuristics choose", "left_out": []}
GOOD: dict[str, Any] = {
    "packages": {"torch": "2.13.0+cu130", "triton": "3.7.1", "transformers": "5.23.0"},
    "supported": {"torch": ">=2.11,<2.16", "triton": ">=3.6,<3.10", "transformers": ">=5.16,<5.24"},
    "cuda": "13.0",
    "gpus": [GPU],
}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, "ready: NVIDIA H200, no tuning table: heuristics choose"),
        ({"packages": GOOD["packages"] | {"torch": "2.10.0"}}, "works, but torch 2.10.0 is outside >=2.11,<2.16"),
        ({"gpus": [GPU | {"left_out": ["stale"]}]}, "works, but stale"),
        ({"gpus": []}, "no speed-up here, because torch sees no NVIDIA GPU"),
        ({"gpus": [], "cuda": None}, "no speed-up here, because torch is a CPU build"),
        ({"gpus": [GPU | {"capability": "75"}]}, "no speed-up here, because NVIDIA H200 is sm_75"),
        ({"packages": GOOD["packages"] | {"triton": None}}, "no speed-up here, because Triton is not installed"),
        ({"broken": {"torchvision": "no such operator"}}, "broken: torchvision does not import (no such operator)"),
    ],
)
def test_the_verdict(changes: dict[str, Any], said: str) -> None:
    assert env.verdict(GOOD | changes).startswith(said)


def test_names_are_printed_as_they_are(qwen3: Path, tmp_path: Path) -> None:
    """Whatever rich would make of `:key:` and `[red]`, and whatever the terminal's encoding lacks."""
    for name in ("coco:train", "a :key: b.png", "[red]a.png"):
        _refused(_run("verify", qwen3, name), f"{name}: no such file")
    picture = tmp_path / "\u56f3 :key: \udc80.png"
    shutil.copy(SAMPLE_IMAGE, picture)
    encoding = {"PYTHONIOENCODING": "latin-1", "COLUMNS": "200"}
    done = _python("-m", "fusedvit", "verify", str(qwen3), str(picture), **encoding)
    assert done.returncode == 0 and "\\u56f3 :key: ?.png" in done.stdout, done.stderr


def test_memory_that_runs_out_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (
        MemoryError("Unable to allocate 3 GiB"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 99 bytes"),
    ):

        def fail(error: Exception = error, **arguments: Any) -> None:
            raise error

        monkeypatch.setattr(env, "run", fail)
        _refused(_run("env"), f"out of memory: {error}")
    monkeypatch.setattr(env, "run", lambda **arguments: (_ for _ in ()).throw(RuntimeError("a fault of ours")))
    assert isinstance(_run("env").exception, RuntimeError)


def test_a_document_of_a_long_name_or_behind_a_link(tmp_path: Path) -> None:
    named = tmp_path / ("n" * 255)
    assert _run("env", "--json", named).exit_code == 0 and json.loads(named.read_text())
    (tmp_path / "share").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "share" / "found.json")
    assert _run("env", "--json", link).exit_code == 0
    assert link.is_symlink() and json.loads((tmp_path / "share" / "found.json").read_text())
    assert [path.name for path in (tmp_path / "share").iterdir()] == ["found.json"]


@pytest.mark.parametrize("step, number", [("replace", errno.EBUSY), ("write_bytes", errno.EACCES)])
def test_a_document_that_may_be_written_and_not_replaced(
    step: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is mounted by itself, or lies in a folder that takes no other."""
    real = getattr(Path, step)

    def refused(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name.endswith(".new"):
            raise OSError(number, os.strerror(number))
        return real(self, *args, **kwargs)

    path = tmp_path / "env.json"
    path.write_text("older")
    before = path.stat().st_ino
    monkeypatch.setattr(Path, step, refused)
    assert _run("env", "--json", path).exit_code == 0
    assert json.loads(path.read_text()) and path.stat().st_ino == before and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_older_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "env.json"
    path.write_text("older")

    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    result = _run("env", "--json", path)
    assert result.exit_code == 2 and "cannot be written (No space left" in result.output
    assert path.read_text() == "older" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match="env.json: cannot be written"):  # a picture too
        write_file(b"drawn", path)


def test_a_console_of_no_width_prints_all_the_same() -> None:
    assert _python("-m", "fusedvit", "env", COLUMNS="0").stdout.strip()
