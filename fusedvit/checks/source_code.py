"""The functions and classes that a module's source file defines, by their code objects.

A function that has been replaced has other code, or code of another module, whatever its name is. Code objects come
from the bytecode that Python caches for a source file, and are read once per module object: another one may stand under
its name for a while.
"""

import ast
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from fusedvit.errors import attempted, named_line, passes

_LONGEST_HEADER = 120  # most lines of a function's decorators and parameters
_NEWLOCALS = 0x2  # `CO_NEWLOCALS`: set on functions, not on class bodies or modules


class UnreadSource(Exception):
    """A module's source cannot be read for now. Nothing that depends on it is known, and nothing is cached."""


class Definition(NamedTuple):
    """Where a function was defined: its module, and its path in that module ("Class.forward", "f.<locals>.g")."""

    module: str
    path: str


def definition_of(value: object) -> Definition | None:
    """Where the module's source defines the function `value`; None if no source does, or `value` is not a function.

    Raises:
        UnreadSource: the source cannot be read for now; as every function here that reads one.
    """
    if type(value) is not FunctionType:
        return None
    name = value.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or vars(module) is not value.__globals__:
        return None
    code = value.__code__
    found = _functions(module).get(code.co_firstlineno, ())
    # From 2.15 on, torch renames the code of its contexts' wrappers, for tracebacks.
    path = next((path for path, defined in found if defined == code.replace(co_name=defined.co_name)), None)
    return None if path is None or not _has_its_defaults(value) else Definition(module.__name__, path)


def _has_its_defaults(function: FunctionType) -> bool:
    """Whether a function's parameters have the defaults of its source; only literals are compared."""
    header = _header(sys.modules[function.__globals__["__name__"]], function.__code__.co_firstlineno)
    if header is None:
        return True
    named = zip(header.args.kwonlyargs, header.args.kw_defaults, strict=True)
    by_name = {argument.arg: node for argument, node in named if node is not None}
    now, by_name_now = function.__defaults__ or (), function.__kwdefaults__ or {}
    if len(now) != len(header.args.defaults) or by_name_now.keys() != by_name.keys():
        return False
    return all(map(_is_value_of, header.args.defaults, now)) and all(
        _is_value_of(node, by_name_now[name]) for name, node in by_name.items()
    )


def _is_value_of(node: ast.expr, value: object) -> bool:
    """Whether an expression in the source may evaluate to `value`; anything but a literal may."""
    try:
        literal = ast.literal_eval(node)
    except ValueError:
        return True
    return type(literal) is type(value) and literal == value


def decorators_of(code: CodeType, module: str) -> frozenset[str] | None:
    """Names in the source's decorators of the function of `code`; None if the source is not known."""
    header = _header(sys.modules[module], code.co_firstlineno)
    if header is None:
        return None
    nodes = [node for decorator in header.decorator_list for node in ast.walk(decorator)]
    return frozenset(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )


@lru_cache(maxsize=4096)
def _header(module: ModuleType, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """A function's decorators and parameters, without its body; None if there is no source text, or for a lambda."""
    lines = _text_of(module)[line - 1 :]
    for end in range(1, min(len(lines), _LONGEST_HEADER) + 1):
        if ":" not in lines[end - 1]:
            continue
        text = textwrap.dedent("".join(lines[:end]))
        for body in ("", " pass"):
            try:
                found = ast.parse(text + body).body[0]
            except SyntaxError:
                continue
            return found if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) else None
    return None


@lru_cache(maxsize=256)
def _text_of(module: ModuleType) -> list[str]:
    loader: Any = getattr(module, "__loader__", None)
    text = _read(lambda: loader.get_source(module.__name__))
    return text.splitlines(keepends=True) if isinstance(text, str) else []


def defines(module: str, path: str) -> bool:
    """Whether the source of `module` defines a function or class at `path`."""
    return path in _paths(sys.modules[module])


def defines_function(module: str, path: str) -> bool:
    """Whether the source of `module` defines a function at `path`, and no class."""
    codes = [code for found in _functions(sys.modules[module]).values() for at, code in found if at == path]
    return bool(codes) and all(code.co_flags & _NEWLOCALS for code in codes)


def names_in(code: CodeType) -> set[str]:
    """Every name that `code` and the functions within it mention: globals and attributes."""
    return {name for part in code_objects_in(code) for name in part.co_names}


def optional_in(code: CodeType) -> set[str]:
    """Names of attributes that `code` may pass to `getattr` or `hasattr`: all its strings, if it calls one of them."""
    asking = (part for part in code_objects_in(code) if {"getattr", "hasattr"} & {*part.co_names})
    return {c for part in asking for c in part.co_consts if isinstance(c, str) and c.isidentifier()}


def wrapped_by(function: FunctionType) -> FunctionType | None:
    """The function that a decorator's wrapper calls: its `__wrapped__`, if its closure holds that too; else None."""
    inner = getattr(function, "__wrapped__", None)
    held = any(cell.cell_contents is inner for cell in cells_of(function))
    return inner if type(inner) is FunctionType and held else None


def cells_of(function: FunctionType) -> list[CellType]:
    """The closure cells that hold functions, as in decorators' wrappers."""
    return [cell for cell in function.__closure__ or () if _holds_function(cell)]


def _holds_function(cell: CellType) -> bool:
    try:
        return type(cell.cell_contents) is FunctionType
    except ValueError:  # not assigned yet
        return False


def code_objects_in(code: CodeType) -> Iterator[CodeType]:
    """`code` and the code of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects_in(constant)


@lru_cache(maxsize=256)
def _functions(module: ModuleType) -> Mapping[int, list[tuple[str, CodeType]]]:
    """Functions and class bodies that the source of `module` defines, by first line."""
    found: dict[int, list[tuple[str, CodeType]]] = defaultdict(list)
    root = code_of(module)
    for path, code in _defined(root, "") if root is not None else ():
        found[code.co_firstlineno].append((path, code))
    return dict(found)


@lru_cache(maxsize=256)
def _paths(module: ModuleType) -> frozenset[str]:
    return frozenset(path for found in _functions(module).values() for path, _ in found)


def code_of(module: ModuleType) -> CodeType | None:
    """The code object of the source of `module`; None if there is none."""
    loader: Any = getattr(module, "__loader__", None)
    code = _read(lambda: loader.get_code(module.__name__))
    return code if isinstance(code, CodeType) else None


def _read(act: Callable[[], object]) -> object:
    """What `act` reads of a source; an error if there is no source: built in, frozen, or gone from the disk.

    Raises:
        UnreadSource: it cannot be read for now.
    """
    found = attempted(act, AttributeError, ImportError, OSError, SyntaxError)
    error = found.__cause__ or found if isinstance(found, Exception) else None  # Python's loaders raise ImportError
    if isinstance(error, OSError) and passes(error):
        raise UnreadSource(named_line(error)) from error
    return found


def _defined(code: CodeType, prefix: str) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            path = prefix + constant.co_name
            yield path, constant
            yield from _defined(constant, f"{path}.<locals>." if constant.co_flags & _NEWLOCALS else f"{path}.")
