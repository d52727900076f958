"""`fusedvit compile` and what it leaves: what fits a machine, where kernels are entered, what is refused."""

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from typer.testing import CliRunner

from fusedvit.cli.app import app
from fusedvit.kernels import tile_configs
from fusedvit.kernels.codegen_checks import GPUS, target_named
from fusedvit.runtime import compiled_kernels
from tests.kernels.test_aot import run
from tests.support.waiting import alive, until
from tests.unit.test_compile_service import environment

H100 = target_named("h100")
FILLS = """
import os, sys, time
from pathlib import Path
from fusedvit.runtime.compiled_kernels import fill

def compiling():
    os.write(1, f"{os.getpid()}\\n".encode())  # whole: print writes a line and its end one by one
    time.sleep(60)

fill(Path(sys.argv[1]), [compiling] * 2, 2, lambda *told: None)
"""


def found(**other: Any) -> dict[str, Any]:
    return compiled_kernels.manifest("h100", H100, ["Qwen3-VL-8B"], "bf16", 90) | other


@pytest.fixture
def a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of compiled kernels that fits this GPU, and is named."""
    (tmp_path / "folder" / "kernel").mkdir(parents=True)
    (tmp_path / "folder" / "kernel" / "launcher.so").write_bytes(b"code")
    (tmp_path / "folder" / "manifest.json").write_text(json.dumps(found()))
    monkeypatch.setattr(compiled_kernels.Target, "of", lambda device: H100)
    monkeypatch.setenv(compiled_kernels.VARIABLE, str(tmp_path / "folder"))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What `fusedvit compile` says that refuses these arguments."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["compile", *map(str, arguments)])
        assert result.exit_code == 2
        return " ".join(result.output.split())

    return run


@pytest.mark.parametrize("where", ["/there", None])
def test_a_machine_that_fails_is_no_kernels_fault(where: str | None, tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)

    with pytest.raises(OSError, match="No space left") as found:
        compiled_kernels.fill(tmp_path, [full] * 3, 2, lambda *told: None)
    assert found.value.filename == (where or str(tmp_path))


@pytest.mark.parametrize(
    "manifest, target, said, usable",
    [
        (found(), H100, "", True),
        (found(), target_named("h200"), "", True),
        (found(), target_named("h100-pcie"), "chosen for h100 with 132 SMs, this GPU has 114", True),
        (found(), target_named("a100"), "compiled for h100 (sm_90), this is sm_80", False),
        (found(triton="3.5.0"), H100, f"compiled with Triton 3.5.0, this is {triton.__version__}", False),
        (found(sources="", fusedvit="0.1.9"), H100, "compiled from the kernels of fusedvit 0.1.9", False),
        (found(ptxas="Build cuda_9"), H100, "compiled with ptxas 'Build cuda_9', this process has 'Build ", False),
    ],
)
def test_what_does_not_fit_is_said(manifest: dict[str, Any], target: Any, said: str, usable: bool) -> None:
    message, of_use = compiled_kernels.mismatch(manifest, target)
    assert message.startswith(said) and bool(message) == bool(said) and of_use == usable


@pytest.mark.parametrize("archive", [None, b"half of it"])
@pytest.mark.usefixtures("a_kernel")
def test_an_archive_that_is_replaced_while_it_runs(
    archive: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A zipapp, or one that is gone: the call goes on, and nothing is said of the folder that is not known."""
    if archive is not None:
        (tmp_path / "app.pyz").write_bytes(archive)
    monkeypatch.setattr(
        tile_configs, "__file__", str(tmp_path / "app.pyz" / "fusedvit" / "kernels" / "tile_configs.py")
    )
    compiled_kernels._sources.cache_clear()
    with caplog.at_level(logging.WARNING, "fusedvit"):
        for _ in range(2):
            compiled_kernels.enter_kernels(torch.device("cuda", 38))
    (said,) = (record.getMessage() for record in caplog.records)
    assert "the kernels' sources, with which it is compared, cannot be read: " in said and "app.pyz" in said


def test_a_folder_is_moved_and_its_kernels_found(tmp_path: Path) -> None:
    done = run(str(Path(__file__).parents[1] / "kernels" / "aot_folder.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["problems"] == [] and set(said["kinds"]) <= {".cubin", ".ptx", ".json", ".so"}
    assert said["entered"] == [said["some"], 0] and said["again"] == 0


def test_it_is_taken_once_and_what_is_wrong_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_kernels.Target, "of", lambda device: replace(H100, num_sms=100 + device.index))
    entered: list[Path] = []
    monkeypatch.setattr(compiled_kernels, "enter", lambda folder, into: entered.append(folder))
    compiled_kernels.enter_kernels(torch.device("cuda", 32))
    assert entered == [], "no folder is named"
    monkeypatch.setenv(compiled_kernels.VARIABLE, str(tmp_path))
    with caplog.at_level(logging.WARNING, "fusedvit"):
        compiled_kernels.enter_kernels(torch.device("cpu"))
        compiled_kernels.enter_kernels(torch.device("cuda", 31))
        assert entered == [] and "manifest.json is not readable" in caplog.text
        (tmp_path / "manifest.json").write_text(json.dumps(found()))
        caplog.clear()
        for _ in range(2):
            compiled_kernels.enter_kernels(torch.device("cuda", 32))
        assert entered == [tmp_path] and not caplog.records
        for _ in range(2):
            compiled_kernels.enter_kernels(torch.device("cuda", 33))
    assert entered == [tmp_path] and [r.getMessage().startswith("fusedvit: ") for r in caplog.records] == [True]


def test_a_kernel_that_is_damaged_is_left_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that was copied in part, say: Triton would take a list of files for the files."""
    for kernel in ("whole", "in part", "cut", "of another kind"):
        folder = tmp_path / "folder" / kernel
        folder.mkdir(parents=True)
        for name in ("k.json", "k.cubin"):
            (folder / name).write_bytes(b"{}")
        listed = {name: f"/built/{kernel}/{name}" for name in ("k.json", "k.cubin")}
        (folder / "__grp__k.json").write_text(json.dumps({"child_paths": listed}))
    (tmp_path / "folder" / "in part" / "k.cubin").unlink()
    (tmp_path / "folder" / "cut" / "__grp__k.json").write_text('{"child_pa')
    (tmp_path / "folder" / "of another kind" / "__grp__k.json").write_text("[1]")
    with caplog.at_level(logging.WARNING, "fusedvit"):
        assert compiled_kernels.enter(tmp_path / "folder", tmp_path / "cache") == 1
    assert [path.parent.name for path in (tmp_path / "cache").rglob("*.json")] == ["whole"]
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("fusedvit: 3 of the compiled kernels in") and "cut: JSONDecodeError" in said


@pytest.mark.parametrize("cache", ["", "file/cache", "caf\udce9"])
@pytest.mark.usefixtures("a_kernel")
def test_where_nothing_takes_files_it_is_said(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_text("no folder")
    monkeypatch.chdir(tmp_path)
    with triton.knobs.cache.scope(), caplog.at_level(logging.WARNING, "fusedvit"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / cache) if cache else "")
        with monkeypatch.context() as here:
            here.setattr(compiled_kernels.tempfile, "mkdtemp", full)
            compiled_kernels.enter_kernels(torch.device("cuda", 34))
        assert "are not used: [Errno 28] No space left on device" in caplog.text
        compiled_kernels.enter_kernels(torch.device("cuda", 35))
        assert (Path(triton.knobs.cache.dir) / "kernel" / "launcher.so").read_bytes() == b"code"
    assert len(caplog.records) == 1 and not (tmp_path / "kernel").exists()


@pytest.mark.usefixtures("a_kernel")
def test_a_folder_that_the_system_cannot_read_now_is_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with triton.knobs.cache.scope(), caplog.at_level(logging.WARNING, "fusedvit"):
        triton.knobs.cache.dir = str(tmp_path / "cache")
        for place in ("_read", "_to_enter"):
            with monkeypatch.context() as here:
                here.setattr(compiled_kernels, place, mock.Mock(side_effect=OSError(24, "Too many open files")))
                compiled_kernels.enter_kernels(torch.device("cuda", 36))
            assert "are not used: [Errno 24]" in caplog.text and not (tmp_path / "cache" / "kernel").exists()
            caplog.clear()
        compiled_kernels.enter_kernels(torch.device("cuda", 36))
    assert (tmp_path / "cache" / "kernel" / "launcher.so").read_bytes() == b"code" and not caplog.records


@pytest.mark.usefixtures("a_kernel")
def test_a_folder_is_entered_into_each_cache_that_triton_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's Inductor and vLLM set TRITON_CACHE_DIR when they first compile."""
    read = mock.Mock(side_effect=compiled_kernels._read)
    monkeypatch.setattr(compiled_kernels, "_read", read)
    for cache in ("cache", "cache", "of a compiler"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / cache))
        compiled_kernels.enter_kernels(torch.device("cuda", 37))
        assert (tmp_path / cache / "kernel" / "launcher.so").read_bytes() == b"code"
    assert read.call_count == 1


def test_compiling_ends_with_the_command(tmp_path: Path) -> None:
    env = environment(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", FILLS, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    compiling = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    until(lambda: not any(map(alive, compiling)))


def test_a_folder_serves_one_gpu(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Its manifest would name the last one only, and the kernels of the first be used no more."""
    (tmp_path / "manifest.json").write_text(json.dumps(found()))
    assert "holds kernels for h100" in refused("Qwen3-VL-8B", "--gpu", "a100", "--out", tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text()) == found()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["Qwen3-VL-8B", "--gpu", "h1000", "--out", "kernels"], "no GPU 'h1000'"),
        (["Qwen3-VL-8B", "--gpu", "h100", "--out", "kernels", "--dtype", "fp8"], "--dtype"),
        (["./nowhere", "--gpu", "h100", "--out", "kernels"], "no such folder"),
        ([".", "--gpu", "h100", "--out", "kernels"], "by zero"),  # of a config that no spec can be made of
        (["Qwen3-VL-8B", "--gpu", "h100", "--out", "file"], "cannot be written (a folder expected, got a file)"),
    ],
)
def test_what_the_command_refuses(
    arguments: list[str], said: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = {"hidden_size": 144, "num_heads": 0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": vision}))
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert said in refused(*arguments)


def test_every_gpu_has_shared_memory_and_a_name() -> None:
    for name in GPUS:
        target = target_named(name)
        assert target.name.startswith("NVIDIA") and target.max_shared >= 99 << 10 and target.num_sms >= 56


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_who_may_read_is_the_umasks_to_say(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        compiled_kernels._write(tmp_path / "folder" / "kernel.json", b"x")
    finally:
        os.umask(before)
    (written,) = (tmp_path / "folder").iterdir()
    assert written.name == "kernel.json" and written.stat().st_mode & 0o777 == 0o666 & ~mask
