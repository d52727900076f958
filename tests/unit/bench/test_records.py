"""What programs of bench/ say where they cannot run: a line and exit code 2, no traceback, before any work."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fusedvit.bench import records  # noqa: E402
from fusedvit.errors import InputError  # noqa: E402

PROGRAMS = ("families", "graph_stress", "sanitize", "pixels.embed", "first_call")


def _program(name: str) -> object:
    return importlib.import_module(f"fusedvit.bench.{name}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="^fusedvit: 1 NVIDIA GPU expected, got 0$"):
        _program(name).main(["--json", str(tmp_path / "x.json")])  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def test_comparing_with_what_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = _program("compare")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for before, said in ((tmp_path, "the root of a checkout of fusedvit expected"), (records.ROOT, "1 NVIDIA GPU")):
        with pytest.raises(SystemExit) as exit:
            program.main([str(before)])  # type: ignore[attr-defined]
        assert exit.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    "program", ["compare .", "engines.vllm_stress .", "engines.vllm_ranks . data", "engines.sglang_bench"]
)
def test_programs_without_what_they_need_end_with_a_line(program: str, tmp_path: Path) -> None:
    if find_spec("sglang") is not None:
        pytest.skip("SGLang is here")
    name, *rest = program.split()
    environment = os.environ | {"PYTHONPATH": str(records.ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", f"fusedvit.bench.{name}", *rest]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and re.search("expected|holds neither", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


def test_without_the_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program("sanitize")
    monkeypatch.setattr(program, "need_gpus", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="compute-sanitizer expected on the path, got none"):
        program.main(["--tool", "memcheck", "--json", str(tmp_path / "x.json")])  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", ["", ".", "absent/x.json"])
def test_a_document_that_can_lie_nowhere(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        records.arguments("About.").parse_args(["--json", given])
    assert (
        exit.value.code == 2 and f"a file in a folder that is there expected, got {given!r}" in capsys.readouterr().err
    )


def test_help_begins_with_the_whole_first_paragraph() -> None:
    shown = " ".join(records.arguments("Does this,\nand that.\n\nDetails.").format_help().split())
    assert "Does this, and that." in shown and "Details" not in shown


def test_a_program_ends_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise InputError("expected this, got that")

    for main, code, said in ((refuse, 2, "expected this, got that\n"), (lambda: 1, 1, "")):
        with pytest.raises(SystemExit) as exit:
            records.run_program(main)
        assert exit.value.code == code and capsys.readouterr().err == said
