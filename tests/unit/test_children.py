"""Processes that this package starts import what this process would, in whichever folder they are started."""

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")

from fusedvit.children import interpreter  # noqa: E402
from fusedvit.cli import kernel_checks  # noqa: E402
from fusedvit.corpus import job as corpus_job  # noqa: E402
from fusedvit.errors import InputError  # noqa: E402


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


@pytest.mark.parametrize(
    ("own", "named", "frozen", "expected"),
    [
        ("/usr/bin/python3", "/usr/bin/python3", False, "/usr/bin/python3"),
        ("/srv/app/uwsgi", "/srv/app/uwsgi", False, "PREFIX/bin/python"),
        ("", "", False, "PREFIX/bin/python"),
        (None, "", False, "PREFIX/bin/python"),
        ("/srv/app/uwsgi", "/srv/app/python3", False, "/srv/app/python3"),
        ("/srv/app/app", "/srv/app/python3", True, "/srv/app/python3"),
        ("/srv/app/python-app", "/srv/app/python-app", True, InputError),
        ("/srv/app/app", "/srv/app/app", True, InputError),
    ],
)
def test_an_application_is_no_interpreter(
    own: Any, named: str, frozen: bool, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyInstaller's and cx_Freeze's name themselves as `sys.executable`, as does what embeds Python."""
    installed = tmp_path / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed.parent.mkdir()
    installed.touch(0o755)
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", own)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(spawn, "get_executable", lambda: os.fsencode(named))
    if expected is InputError:
        with pytest.raises(InputError, match="multiprocessing.set_executable"):
            interpreter()
    else:
        assert interpreter().startswith(expected.replace("PREFIX", str(tmp_path)))
