"""The house rules on imports and sizes, read from the sources. Each rule yields its violations as lines of text."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = {"fusedvit": "fusedvit"} | {name: f"fusedvit.{name}" for name in ("kernels", "graphs", "bench")}
MAY_IMPORT = {  # beyond the standard library; a folder that is not named may import anything
    "kernels": ("fusedvit.kernels", "torch", "triton", "einops"),
    "graphs": ("fusedvit.graphs", "torch"),
}
OUTSIDE_CORE = re.compile(r"(fusedvit/cli|bench)/.*")  # what the encoder must not need
MAY_IMPORT_TRANSFORMERS = re.compile(rf"fusedvit/api\.py|fusedvit/families/.*|{OUTSIDE_CORE.pattern}")
OUTER = ("fusedvit.cli", "fusedvit.bench")
MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 800, 40, 120
MACHINE = re.compile(
    r"(?<![\w./])/(?:work|root|home|opt|Users|mnt)/\w|[A-Z]:\\\\?Users"  # absolute paths of one machine
    r"|pypi\.org|pythonhosted\.org|download\.pytorch|conda\.anaconda"  # package registries
)
TEXT = {".py", ".md", ".toml", ".json", ".txt", ".cfg", ".ini", ".yml", ".yaml", ".sh", ""}


@dataclass(frozen=True)
class Import:
    """One imported module of one source file."""

    target: str
    line: int
    inside_function: bool
    type_checking: bool


@dataclass(frozen=True)
class Source:
    """One parsed file: `path` relative to the root, `module` the name that it is imported by."""

    path: str
    module: str
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        return self.path.split("/")[0]


def read_sources(root: Path) -> list[Source]:
    sources = []
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            module = ".".join((package, *parts)).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            sources.append(Source(path.relative_to(root).as_posix(), module, text, ast.parse(text)))
    return sources


def imports_of(source: Source) -> list[Import]:
    """Every import of a file. `from a import b` counts as `a.b`, since b may be a module; relative ones as `.`."""
    found: list[Import] = []

    def visit(node: ast.AST, inside: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, inside, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found.extend(Import(f"{base}.{alias.name}", node.lineno, inside, typing) for alias in node.names)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            visit(child, inside, typing)

    visit(source.tree, False, False)
    return found


def within(target: str, package: str) -> bool:
    return target == package or target.startswith(package + ".")


def within_any(target: str, packages: tuple[str, ...]) -> bool:
    return any(within(target, package) for package in packages)


def wrong_directions(sources: list[Source]) -> Iterator[str]:
    for source in sources:
        allowed = MAY_IMPORT.get(source.folder)
        for item in imports_of(source):
            standard = item.target.split(".")[0] in sys.stdlib_module_names
            where = f"{source.path}:{item.line}: "
            if allowed and not standard and not within_any(item.target, allowed):
                yield f"{where}{source.folder} imports {item.target}"
            if within(item.target, "transformers") and not MAY_IMPORT_TRANSFORMERS.fullmatch(source.path):
                yield f"{where}imports transformers"
            if within_any(item.target, OUTER) and not OUTSIDE_CORE.fullmatch(source.path):
                yield f"{where}the core imports {item.target}"


def wrong_forms(sources: list[Source]) -> Iterator[str]:
    for source in sources:
        for item in imports_of(source):
            where = f"{source.path}:{item.line}: "
            if item.target.startswith("."):
                yield f"{where}relative import {item.target}"
            if item.target.split(".")[0] in ("kernels", "graphs", "bench"):
                yield f"{where}imports {item.target} past fusedvit"
            if item.inside_function and within(item.target, "fusedvit"):
                yield f"{where}imports {item.target} inside a function"


def cycles(sources: list[Source]) -> Iterator[str]:
    """Import cycles. Imports for the type checker alone are left out: the public names load lazily."""
    names = {source.module for source in sources}
    edges: dict[str, list[str]] = {}
    for source in sources:
        targets = [item.target for item in imports_of(source) if not item.type_checking]
        known = [target if target in names else target.rpartition(".")[0] for target in targets]
        edges[source.module] = [target for target in known if target in names and target != source.module]

    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> Iterator[str]:
        if module in trail:
            yield " -> ".join((*trail[trail.index(module) :], module))
        elif module not in done:
            for target in edges[module]:
                yield from walk(target, (*trail, module))
            done.add(module)

    for module in sorted(names):
        yield from walk(module, ())


def too_long(sources: list[Source]) -> Iterator[str]:
    """Files and functions past their limits; a function's docstring and decorators do not count."""
    for source in sources:
        lines = source.text.count("\n")
        if lines > MAX_FILE:
            yield f"{source.path}: {lines} lines, at most {MAX_FILE}"
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            length, limit = function_length(node), MAX_KERNEL if kernel else MAX_FUNCTION
            if length > limit:
                yield f"{source.path}:{node.lineno}: {node.name} has {length} lines, at most {limit}"


def function_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return length


def machine_traces(root: Path) -> Iterator[str]:
    """Lines that hold an absolute path of some machine, or the address of a package registry."""
    tops = [*FOLDERS, "docs", "tests", ".ci", "Makefile", "README.md", "pyproject.toml", ".gitignore"]
    files = [path for top in tops for path in ((root / top).rglob("*") if (root / top).is_dir() else [root / top])]
    for path in sorted(files):
        if not path.is_file() or path.suffix not in TEXT or "__pycache__" in path.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := MACHINE.search(line):
                yield f"{path.relative_to(root).as_posix()}:{number}: {match.group()}"
