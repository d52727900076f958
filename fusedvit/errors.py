"""The exceptions of fusedvit, and `Reason`: why a tower or a call cannot run fused.

Wrong input to a call raises ValueError or TypeError instead.
"""

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")

ODD_POSITIONS = "odd positions"  # kinds of `Reason`
EMPTY_ITEMS = "items without frames"
SPARSE = "sparse pixels"
BEYOND_FP16 = "beyond fp16"
PREFIX = "fusedvit: "  # begins every message; commands print it without
# What code raises for an object that is not what it expects: another config, or a module that contains itself.
OF_ODD_OBJECTS = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
_LASTING = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


class Reason(NamedTuple):
    """Why something cannot run fused.

    Attributes:
        kind: what `stats()` counts, one of `fusedvit.checks.fallback.ADVICE`.
        detail: the module path, argument or object concerned, what was expected and what was found; "" for none.
    """

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class InputError(ValueError):
    """A file, folder, option or model that the user gave cannot be used; the message names it. Commands exit with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message if message.startswith(PREFIX) else PREFIX + message)


@contextmanager
def as_input_error(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """A context that turns an error of `kinds` (all kinds if none is given) into an InputError: `what`, and the error's
    first line."""
    kinds = kinds or (Exception,)
    try:
        yield
    except kinds as error:
        raise InputError(f"{what}: {first_line(error)}") from None


class UnsupportedModel(InputError):
    """A model has no supported vision tower, or several, or a processor cannot return bytes; the message says which."""


def attempted(act: Callable[[], Result], *kinds: type[Exception]) -> Result | Exception:
    """Returns what `act` returns, or the error of `kinds` (all kinds if none is given) that it raises each time.

    A signal's handler may raise anywhere, for example to end a request that takes too long. Such an error is no fault
    of `act`, so `act` is called again after an error. If it does not raise again, the first error, or the timeout that
    caused it, is raised: libraries turn what interrupts them into errors of their own. But if the system caused the
    first error, such as by a lack of file descriptors, what `act` has returned since is the result.
    """
    kinds = kinds or (Exception,)
    try:
        return act()
    except kinds as error:
        first = error
    try:
        found = act()
    except kinds as error:
        return error.with_traceback(None)  # its frames would keep their objects alive
    try:
        if _is_of_system(first):
            return found
        raise _origin(first)
    finally:
        del first


def _origin(error: Exception) -> BaseException:
    """The timeout that led to `error`; without one, the first of its explicit causes."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    step: BaseException | None = error
    while step is not None and not is_of_handler(step):
        step = step.__cause__ or step.__context__
    return step or cause


def _is_of_system(error: Exception) -> bool:
    origin = _origin(error)
    return isinstance(origin, OSError) and origin.errno is not None


def is_of_handler(error: BaseException) -> bool:
    """Whether `error` is a timeout that a signal's handler raised: timeouts of the system have an errno."""
    return isinstance(error, TimeoutError) and error.errno is None


def passes(error: OSError) -> bool:
    """Whether what failed may succeed later: not if a file is missing or forbidden, but if no descriptor is free or a
    file server does not answer."""
    return bool(error.errno) and error.errno not in _LASTING  # without an errno it is an importer's


def unnamed(error: BaseException) -> str:
    """An error's message without the prefix "fusedvit: ", for commands, and for messages that already begin with it."""
    return str(error).removeprefix(PREFIX)


def first_line(error: BaseException) -> str:
    """The first paragraph of an error's message, without the prefix "fusedvit: ", in one line of at most 300
    characters, else the error's class."""
    return " ".join(unnamed(error).strip().split("\n\n")[0].split())[:300] or type(error).__name__


def shown(value: object) -> str:
    """A wrong value for messages: as `repr` writes it, if that is one line of at most 80 characters, else its type."""
    try:
        said = repr(value)
    except Exception:  # of somebody's class, or a number with more digits than Python writes
        said = ""
    return said if said and len(said) <= 80 and "\n" not in said else type(value).__name__


def from_json(text: str | bytes) -> Any:
    """What `text` says, as `json.loads`, which raises RecursionError for some texts.

    Raises:
        ValueError: `text` is no JSON, or nested deeper than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("no JSON: nested deeper than Python reads") from None


def of_folder(error: OSError) -> str:
    """Why a folder cannot be made, for messages."""
    return "a folder expected, got a file" if isinstance(error, FileExistsError) else str(error.strerror)


def named_line(error: BaseException) -> str:
    """An error's class and whole message, in one line of at most 500 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or GPU memory ran out; for host memory PyTorch raises a plain RuntimeError that only says so."""
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
    return said or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def failed_import(error: BaseException) -> str | None:
    """In one line, which package fails to import and why; None if `error` is not from an import, or from fusedvit's.

    A failing import rarely raises ImportError: a package that is incompatible with torch raises whatever torch raised.
    """
    module = _module_being_run(error)
    if module is None and not isinstance(error, ImportError):
        return None
    while error.__cause__ is not None:  # transformers' own error only names the module that it wanted to import
        error = error.__cause__
        module = _module_being_run(error) or module
    package = (getattr(error, "name", None) or module or "a package").partition(".")[0]
    return None if package == "fusedvit" else f"{package} does not import: {first_line(error)}"


def _module_being_run(error: BaseException) -> str | None:
    """The innermost module whose top-level code was running, as in an import, when `error` was raised."""
    found, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_name == "<module>":
            found = str(step.tb_frame.f_globals.get("__name__"))
        step = step.tb_next
    return found


class WeightsReleased(Exception):
    """Weights were released during a run that used them. The call runs again, unless the tower was unfused."""
