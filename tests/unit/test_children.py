"""Processes that this package starts import what this process would, in whichever folder they are started."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")

from fusedvit.cli import kernel_checks  # noqa: E402
from fusedvit.corpus import job as corpus_job  # noqa: E402


def _of_checks(program: str, monkeypatch: pytest.MonkeyPatch) -> "subprocess.Popen[Any]":
    monkeypatch.setattr(kernel_checks, "PROGRAM", program)
    return kernel_checks._Worker(["compile"], subprocess.PIPE, subprocess.PIPE).process


def _of_corpus(program: str, monkeypatch: pytest.MonkeyPatch) -> "subprocess.Popen[Any]":
    monkeypatch.setattr(corpus_job, "WORKER", program)
    return corpus_job._started(corpus_job.Job("a model", ("a",), "out"), 0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-m searches the working folder first")
@pytest.mark.parametrize("start", [_of_checks, _of_corpus])
def test_modules_are_found_where_this_process_finds_them(
    start: Callable[[str, pytest.MonkeyPatch], "subprocess.Popen[Any]"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added, here = tmp_path / "added", tmp_path / "here"
    added.mkdir()
    here.mkdir()
    (added / "of_program.py").write_text("import colorsys; print(colorsys.__file__)")
    (here / "colorsys.py").write_text("")
    monkeypatch.syspath_prepend(added)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.chdir(here)
    said = start("of_program", monkeypatch).communicate()[0]
    said = said if isinstance(said, str) else said.decode()
    assert said and not said.startswith(str(here))
