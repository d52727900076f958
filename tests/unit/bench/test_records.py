"""What programs of bench/ say where they cannot run: a line and exit code 2, no traceback, before any work."""

import importlib
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fusedvit.bench import records  # noqa: E402
from fusedvit.errors import InputError  # noqa: E402

PROGRAMS = ("families", "graph_stress", "sanitize", "pixels.embed")


def _program(name: str) -> object:
    return importlib.import_module(f"fusedvit.bench.{name}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="^1 NVIDIA GPU expected, got 0$"):
        _program(name).main(["--json", str(tmp_path / "x.json")])  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


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


def test_a_program_ends_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise InputError("expected this, got that")

    for main, code, said in ((refuse, 2, "expected this, got that\n"), (lambda: 1, 1, "")):
        with pytest.raises(SystemExit) as exit:
            records.run_program(main)
        assert exit.value.code == code and capsys.readouterr().err == said
