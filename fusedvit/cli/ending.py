"""How every command ends, also `--help` and `--version`: one rule for the exit code, whatever standard output, standard
error and signals do. Nothing here needs the packages of the extra "cli".

    130   Ctrl-C
    141   nobody reads standard output; the code of a process that SIGPIPE ends
    143   SIGTERM, after the same clean-up as Ctrl-C
    2     standard output is closed or cannot be written, with a line on standard error
    3     an unforeseen error, with its traceback; never 1, which commands use for their own findings
    else  the command's own code; standard error never changes it
"""

import errno
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

PASSED, FAILED, UNUSABLE, UNFORESEEN = 0, 1, 2, 3  # UNUSABLE is click's own for bad usage
INTERRUPTED, NO_READER, TERMINATED = 130, 141, 143
_EXTRAS = {**dict.fromkeys(("typer", "rich", "matplotlib", "PIL", "av"), "cli"), "pyarrow": "embed"}
_STDOUT, _STDERR = 1, 2  # descriptors


class Unwritable(Exception):
    """Standard output takes no more. It is no OSError, since commands, rich and click handle those on their own."""


class _Descriptor(io.FileIO):
    """A standard stream. It keeps its first error, and drops everything written after that."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())  # for the rest in buffers, and for child processes
        os.close(null)
        if self.fileno() == _STDOUT:
            raise Unwritable
        return len(data)


def ended(command: Callable[[], None]) -> int:
    """Runs a command, which may end in SystemExit, and returns the process's exit code."""
    closed = sys.stdout is None
    _fill_closed_descriptors()
    _replaced(sys.stderr, _STDERR)
    if closed:
        return _unwritable("cannot be written (closed)")
    output = _replaced(sys.stdout, _STDOUT)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited: exit codes of child processes would be lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.getsignal(signal.SIGTERM)
    terminated = _interrupted_by_sigterm()
    code = _code_of(command)
    signal.signal(signal.SIGTERM, before)  # nothing is left to clean up
    exec("")  # CPython dies of SIGINT at exit if the last code text it ran was interrupted, as in an import
    if terminated:
        return TERMINATED
    if code == INTERRUPTED or output is None or output.error is None:
        return code
    if output.error.errno == errno.EPIPE:
        return NO_READER
    return _unwritable(str(output.error.strerror))


def _code_of(command: Callable[[], None]) -> int:
    code = PASSED
    try:
        try:
            command()
        except SystemExit as error:
            code = _code_in(error)
        sys.stdout.flush()  # an error at Python's exit would change the code
    except Unwritable:
        return UNUSABLE
    except KeyboardInterrupt:  # while modules are imported; later typer turns it into an exit
        return INTERRUPTED
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # typer has set its own by now
        return UNFORESEEN
    return code


def _code_in(error: SystemExit) -> int:
    """The exit code of a SystemExit. Where a library exits with a text, Python would print it and exit with 1."""
    if isinstance(error.code, int | None):
        return error.code or PASSED
    print(error.code, file=sys.stderr)
    return UNFORESEEN


def missing_extra(error: BaseException) -> str | None:
    """The advice if a package of an extra is not installed; None for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    extra = _EXTRAS.get((error.name or "").split(".")[0])
    return f'The command needs {error.name}: pip install "fusedvit[{extra}]"' if extra else None


def _unwritable(why: str) -> int:
    print(f"standard output: {why}", file=sys.stderr)
    return UNUSABLE


def _fill_closed_descriptors() -> None:
    """Opens closed standard descriptors: else the next opened file would get number 1 or 2 and be taken for a standard
    stream."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(null, True)
    os.close(null)


def _replaced(stream: Any, number: int) -> _Descriptor | None:
    """Replaces a standard stream by one that escapes characters its encoding lacks (file names may hold any) and keeps
    its errors. A stream that has already replaced the standard one stays."""
    name = {_STDOUT: "stdout", _STDERR: "stderr"}[number]
    if stream is not getattr(sys, f"__{name}__"):
        return None
    raw = _Descriptor(number)
    by_line = True if stream is None else stream.line_buffering or stream.write_through
    encoding = "utf-8" if stream is None else stream.encoding
    text = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=by_line)
    setattr(sys, name, text)
    return raw


def _interrupted_by_sigterm() -> list[int]:
    """Makes SIGTERM interrupt as Ctrl-C does, child processes included, and appends it to the returned list. Forked
    processes still end at once by it."""
    received: list[int] = []
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the starting process had it ignored
        return received

    def interrupt(number: int, frame: Any) -> None:
        received.append(number)
        for child in multiprocessing.active_children():  # else their pool waits for all their work
            child.terminate()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_let_sigterm, after_in_child=_end_by_sigterm)
    return received


def _hold_sigterm() -> None:
    """Blocks SIGTERM during a fork: a child that still has its parent's handler would lose the signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _let_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_sigterm()
