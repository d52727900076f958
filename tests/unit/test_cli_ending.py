"""How every command ends: whatever standard output and standard error are, in any locale, and by signals."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL.Image")

from typer.testing import CliRunner  # noqa: E402

from fusedvit.cli import env  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
ROOT = Path(__file__).resolve().parents[2]
COMMAND = f"{sys.executable} -m fusedvit"
COMMANDS = ["", "demo", "verify", "compile", "env", "tune", "embed", "bench", "bench kernels", "bench pixels"]
QUICK = ["--help", "--version", "embed --help"]


def _shell(text: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """What bash does, where `fusedvit` is the command; the exit code is that of its first process."""
    text = f"{text.replace('fusedvit', COMMAND, 1)}; exit ${{PIPESTATUS[0]}}"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "100"} | variables
    return subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=False, env=environment, timeout=300, cwd=cwd
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_in_any_locale(command: str, encoding: str) -> None:
    result = CliRunner(charset=encoding).invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output


def test_what_an_encoding_lacks_is_spelled_out() -> None:
    code = "from fusedvit.cli.ending import ended; print(ended(lambda: print(chr(0x2026), chr(0xdc80))))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert done.stdout == "\\u2026 \\udc80\n0\n"


# ── standard output ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", [*QUICK, "env", "env --json -"])
def test_nobody_reads_the_output(command: str) -> None:
    """Not 1: that says that answers differ."""
    done = _shell(f"fusedvit {command} | true")
    assert done.returncode == 141 and not re.search("Error|Traceback|Exception", done.stderr), done.stderr


@pytest.mark.parametrize("command", [*QUICK, "env", "env --json -"])
@pytest.mark.parametrize(
    "to, said",
    [(">/dev/full", "No space left on device"), (">&-", "cannot be written (closed)")],
    ids=["full", "closed"],
)
def test_an_output_that_cannot_be_written(command: str, to: str, said: str) -> None:
    done = _shell(f"fusedvit {command} {to}")
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == f"standard output: {said}", done.stderr
    assert not re.search("Traceback|Exception", done.stderr)


# ── standard error ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "command, code, to",
    [("env", 0, "2>/dev/full"), ("env", 0, "2>&-"), ("verify /nope", 2, "2> >(true)"), ("nothing", 2, "2>/dev/full")],
)
def test_a_broken_standard_error_changes_nothing(command: str, code: int, to: str) -> None:
    done = _shell(f"fusedvit {command} {to}")
    assert done.returncode == code and ("torch" in done.stdout) == (command == "env"), done.stdout


def test_files_do_not_take_the_place_of_a_closed_standard_error(tmp_path: Path) -> None:
    code = "import os; from fusedvit.cli.ending import ended; ended(lambda: print(os.open('x', os.O_CREAT) > 2))"
    command = f'cd {tmp_path} && PYTHONPATH={ROOT} {sys.executable} -c "{code}" 2>&- 0<&-'
    assert subprocess.run(command, shell=True, capture_output=True, text=True).stdout == "True\n"


# ── what nobody foresaw ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "raises, said",
    [
        ("raise KeyError('a fault')", "KeyError: 'a fault'"),
        ("raise RuntimeError('a fault')", "RuntimeError: a fault"),
        ("sys.exit('a library ends it')", "a library ends it"),
    ],
)
def test_a_fault_is_no_answer_that_differs(raises: str, said: str) -> None:
    """It leaves with its traceback, and a code of its own."""
    code = f"""
import sys
from fusedvit.cli import env
from fusedvit.__main__ import main
def run(**arguments):
    {raises}
env.run, sys.argv = run, ["fusedvit", "env"]
main()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 3 and said in done.stderr.strip().splitlines()[-1], done.stderr
    assert ("Traceback" in done.stderr) == ("Error" in raises)


# ── errors of the machine ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("file, said", [(None, "env: "), ("here/a.bin", "here/a.bin: ")])
def test_an_error_of_the_system_is_not_standard_outputs(
    file: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (errno.EMFILE, errno.EPIPE):

        def fail(number: int = number, **arguments: Any) -> None:
            raise OSError(number, os.strerror(number), *filter(None, [file]))

        monkeypatch.setattr(env, "run", fail)
        result = CliRunner().invoke(app, ["env"])
        assert result.exit_code == 2 and f"{said}{os.strerror(number)}\n" in result.output, result.output


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    done = _shell(f"rmdir {folder} && fusedvit env --json x.json", folder)
    assert done.stderr.splitlines()[-1] == "x.json: cannot be written (No such file or directory)"
    assert done.returncode == 2


# ── signals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _signalled(number: int, before: str = "pass") -> "subprocess.CompletedProcess[str]":
    """A command that a signal reaches, and what it cleans up."""
    code = f"""
import os, signal, sys, time, types
from fusedvit import __main__
{before}
def run(json):
    try:
        os.kill(os.getpid(), {number})
        time.sleep(5)
        print("went on")
        return types.SimpleNamespace(passed=True)
    finally:
        print("cleaned up")
sys.modules["fusedvit.cli.env"] = types.SimpleNamespace(run=run)
sys.argv = ["fusedvit", "env"]
__main__.main()
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_command_after_its_clean_up(number: int, code: int) -> None:
    done = _signalled(
        number, "signal.signal(signal.SIGINT, signal.default_int_handler)"
    )  # a job in the background has none
    assert (done.returncode, done.stdout) == (code, "cleaned up\n") and "Traceback" not in done.stderr


@pytest.mark.parametrize("name, code", [("INT", 130), ("TERM", 143)])
def test_a_signal_that_interrupts_text(name: str, code: int, tmp_path: Path) -> None:
    """As each dataclass is, which is made while torch is imported."""
    (tmp_path / "interrupted.py").write_text(
        f"""
import signal
import fusedvit.__main__ as command
signal.signal(signal.SIGINT, signal.default_int_handler)
command._command = lambda: exec("import os, signal, time\\nos.kill(os.getpid(), signal.SIG{name})\\ntime.sleep(5)")
command.main()
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], check=False, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    )
    assert done.returncode == code


def _interrupted(command: str) -> "subprocess.CompletedProcess[str]":
    """A command whose text sends itself signals, as Python runs it in the foreground."""
    code = f"""
import os, signal, time
from fusedvit.cli.ending import ended
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
def command():
{command}
raise SystemExit(ended(command))
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)


def test_an_interrupt_that_a_library_drops() -> None:
    """As torch does while it imports NumPy: the next import of NumPy then fails."""
    done = _interrupted(
        """
    try:
        interrupt()
    except KeyboardInterrupt:
        raise SystemExit(2)
"""
    )
    assert done.returncode == 130


def test_further_interrupts_show_no_traceback() -> None:
    """While the first one is handled, and once the command has ended."""
    done = _interrupted(
        """
    import atexit
    atexit.register(interrupt)
    try:
        interrupt()
    finally:
        interrupt()
"""
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_pool_of_processes_ends_with_its_command() -> None:
    """As after Ctrl-C, which reaches the pool's processes too: it does not wait for all that they have to do."""
    code = """
import os, signal, threading, time
from concurrent.futures import ProcessPoolExecutor
from fusedvit.cli.ending import ended
def command():
    with ProcessPoolExecutor(2) as pool:
        tasks = [pool.submit(time.sleep, 60) for _ in range(8)]
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        tasks[0].result()
raise SystemExit(ended(command))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, timeout=50
    )
    assert done.returncode == 143, done.stderr


def test_commands_learn_how_their_children_end() -> None:
    code = (
        "import signal, subprocess; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "from fusedvit.cli.ending import ended; ended(lambda: print(subprocess.call('exit 3', shell=True)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT).stdout == b"3\n"


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    done = _signalled(signal.SIGTERM, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert (done.returncode, done.stdout) == (0, "went on\ncleaned up\n")


def test_forked_processes_end_by_the_signal_itself() -> None:
    code = """
import os, signal, time
from fusedvit.cli.ending import ended
def command():
    for _ in range(20):  # the signal comes at once, or later
        child = os.fork()
        if not child:
            time.sleep(10)
            os._exit(3)
        os.kill(child, signal.SIGTERM)
        ended_by = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended_by != -signal.SIGTERM:
            break
    print(ended_by)
raise SystemExit(ended(command))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{-signal.SIGTERM}\n", "")
