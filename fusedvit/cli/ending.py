"""How every command ends, also `--help` and `--version`: one rule for the exit code, whatever standard output, standard
error and signals do. Nothing here needs the packages of the extra "cli".

    130   Ctrl-C; once the command has ended, a further one ends the process by the signal, which shells call 130 too
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
    received = _interrupted_by_signals()
    try:
        code = _code_of(command)
    except KeyboardInterrupt:  # while modules are imported; later typer turns it into an exit
        code = INTERRUPTED
    _let_signals_end()
    exec("")  # CPython dies of SIGINT at exit if the last code text it ran was interrupted, as in an import
    if received:  # also where a library has dropped the interrupt, as torch does while it imports NumPy
        return TERMINATED if signal.SIGTERM in received else INTERRUPTED
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


def _interrupted_by_signals() -> list[int]:
    """Makes SIGTERM interrupt as Ctrl-C does, child processes included, and returns a list that gets both signals'
    numbers as they arrive. Forked processes still end at once by SIGTERM. A signal that the starting process had
    ignored stays ignored."""
    received: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        received.append(number)
        if number == signal.SIGTERM:  # Ctrl-C reaches children too
            for child in multiprocessing.active_children():  # else their pool waits for all their work
                child.terminate()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, interrupt)
        os.register_at_fork(before=_hold_sigterm, after_in_parent=_let_sigterm, after_in_child=_end_by_sigterm)
    return received


def _let_signals_end() -> None:
    """Nothing is left to clean up: a further signal, such as of an impatient user, ends the process at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _hold_sigterm() -> None:
    """Blocks SIGTERM during a fork: a child that still has its parent's handler would lose the signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _let_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_sigterm()
