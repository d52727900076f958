"""The house rules on imports and sizes, read from the sources. Each rule yields its violations as lines of text."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDERS = {"fusedvit": "fusedvit"} | {name: f"fusedvit.{name}" for name in ("kernels", "graphs", "bench")}

# Which areas of our own an area may import besides itself. An area is a folder, or a file directly in fusedvit/.
OUTER = {"cli": ("bench",), "bench": ("serving",), "serving": ()}  # import all inner areas, and of one another these
_ENGINE = ("checks", "runtime", "model", "graphs", "kernels", "config", "errors")  # what runs a call
DIRECTIONS: dict[str, tuple[str, ...]] = {
    "kernels": (),
    "graphs": (),
    "errors": (),
    "tolerance": (),
    "children": ("errors",),
    "cores": (),
    "archives": (),
    "config": ("graphs", "errors"),
    "model": ("kernels",),
    "runtime": ("model", "graphs", "kernels", "children", "cores", "errors"),
    "families": ("model",),
    "checks": ("families", "model", "errors"),
    "pixels": ("model", "kernels", "checks", "cores", "errors"),
    "stats": ("checks", "runtime", "model", "graphs", "kernels", "errors", "forks"),
    "prepared_tower": (*_ENGINE, "forks"),
    "forks": (),
    "calls": ("checks", "runtime", "kernels", "pixels", "prepared_tower", "errors"),
    "fused_encoder": (
        *("checks", "runtime", "model", "graphs", "config", "errors"),
        *("families", "pixels", "prepared_tower", "calls", "stats", "forks"),
    ),
    "outputs": ("checks", "model", "pixels", "fused_encoder", "calls"),
    "checkpoint": ("checks", "families", "errors"),
    "api": (
        *("checks", "families", "model", "runtime", "config", "errors", "pixels"),
        *("fused_encoder", "calls", "outputs", "forks"),
    ),
    "tower_copies": ("api", "fused_encoder", "outputs", "checks", "runtime", "model", "errors"),
    "data_parallel": (
        *("api", "fused_encoder", "outputs", "checks", "runtime", "model", "config", "errors", "forks"),
        "tower_copies",
    ),
    "corpus": ("api", "checkpoint", "checks", "children", "config", "cores", "errors", "fused_encoder", "pixels"),
}
# Packages beside the standard library and our own, by folder, the inner one first; other folders may import any.
PACKAGES = {
    "kernels/reference": ("torch", "triton", "einops", "numpy"),
    "kernels": ("torch", "triton"),
    "graphs": ("torch",),
}
TRANSFORMERS = ("checkpoint", "corpus", "pixels", *OUTER)  # may import it, in functions

MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 800, 40, 120  # lines
MAX_FOLDER, MAX_FOLDERS = 16, {"kernels/hopper": 10}  # Python files of one folder, __init__.py not counted
MAX_DEPTH = 15  # modules in the longest chain of imports: a command, a benchmark, a call, a kernel
_RECORDS = {"_make", "_replace", "_asdict", "_fields"}
OTHERS_PRIVATE = {"_version", "_parameters", "_modules", "_buffers", "_sleep", *_RECORDS}

MACHINE = re.compile(
    r"(?<![\w./])/(?:work|root|home|opt|Users|mnt)/\w|[A-Z]:\\\\?Users"  # absolute paths of one machine
    r"|pypi\.org|pythonhosted\.org|download\.pytorch|conda\.anaconda"  # package registries
)
TEXT = {".py", ".md", ".toml", ".json", ".txt", ".cfg", ".ini", ".yml", ".yaml", ".sh", ""}
TOPS = (*FOLDERS, "docs", "tests", ".ci", "Makefile", "README.md", "CHANGELOG.md", "pyproject.toml", ".gitignore")


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
    def area(self) -> str:
        return area_of(self.module)


def read_sources(root: Path) -> list[Source]:
    """Every Python file of the four folders."""
    sources = []
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            module = ".".join((package, *parts)).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            sources.append(Source(path.relative_to(root).as_posix(), module, text, ast.parse(text)))
    return sources


def area_of(module: str) -> str:
    """`fusedvit.model.spec` -> `model`; of the package itself and its dunder names the empty string."""
    names = module.split(".")
    return "" if len(names) == 1 or names[1].startswith("__") else names[1]


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


def wrong_directions(sources: list[Source]) -> Iterator[str]:
    """Imports of another area of ours, against `DIRECTIONS`."""
    for source in sources:
        allowed = DIRECTIONS.get(source.area)
        if allowed is None and source.area not in ("", *OUTER):
            yield f"{source.path}: area {source.area!r} is in none of the rules"
            continue
        for item in imports_of(source):
            area = area_of(item.target)
            if not within(item.target, "fusedvit") or (allowed is None and area not in OUTER):
                continue
            if area not in ("", source.area, *(OUTER.get(source.area, ()) if allowed is None else allowed)):
                yield f"{source.path}:{item.line}: {source.area} imports {item.target}"


def unused_allowances(sources: list[Source]) -> Iterator[str]:
    """Pairs of `DIRECTIONS` and `OUTER`, and areas of `TRANSFORMERS`, that no file needs."""
    used = {(source.area, area_of(item.target)) for source in sources for item in imports_of(source)}
    for area, allowed in {**DIRECTIONS, **OUTER}.items():
        yield from (f"{area} imports no {other}" for other in allowed if (area, other) not in used)
    with_transformers = {s.area for s in sources for item in imports_of(s) if within(item.target, "transformers")}
    yield from (f"{area} imports no transformers" for area in TRANSFORMERS if area not in with_transformers)


def wrong_packages(sources: list[Source]) -> Iterator[str]:
    """Other people's packages where they do not belong, and transformers at the top of a file."""
    for source in sources:
        allowed = next((names for folder, names in PACKAGES.items() if source.path.startswith(f"{folder}/")), None)
        for item in imports_of(source):
            package = item.target.split(".")[0]
            ours = package in ("", "fusedvit") or package in sys.stdlib_module_names
            if allowed is not None and not ours and package not in allowed:
                yield f"{source.path}:{item.line}: {source.area} imports {item.target}"
            elif package == "transformers" and source.area not in TRANSFORMERS:
                yield f"{source.path}:{item.line}: {source.area} imports transformers"
            elif package == "transformers" and not item.inside_function and not item.type_checking:
                yield f"{source.path}:{item.line}: imports transformers when it is imported itself"


def wrong_statements(sources: list[Source]) -> Iterator[str]:
    """Relative imports, ways around `fusedvit.`, and imports of our own inside a function."""
    for source in sources:
        for item in imports_of(source):
            where = f"{source.path}:{item.line}: "
            if item.target.startswith("."):
                yield f"{where}relative import {item.target}"
            if item.target.split(".")[0] in ("kernels", "graphs", "bench"):
                yield f"{where}imports {item.target} past fusedvit"
            if item.inside_function and within(item.target, "fusedvit"):
                yield f"{where}imports {item.target} inside a function"


def private_names(sources: list[Source]) -> Iterator[str]:
    """Names with a leading underscore that another of our files defines, imported or read as an attribute.

    An attribute counts where this file defines nothing of its name and another one does, as a function, class,
    variable or attribute of `self`.
    """
    defined = {source.path: frozenset(_defined(source.tree)) - OTHERS_PRIVATE for source in sources}
    files_with = Counter(name for names in defined.values() for name in names)
    for source in sources:
        for item in imports_of(source):
            name = item.target.rpartition(".")[2]
            if within(item.target, "fusedvit") and _is_private(name):
                yield f"{source.path}:{item.line}: imports {item.target}"
        for node in ast.walk(source.tree):
            theirs = isinstance(node, ast.Attribute) and node.attr not in defined[source.path]
            if theirs and files_with[node.attr]:
                yield f"{source.path}:{node.lineno}: reads {ast.unparse(node)}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.Module) -> Iterator[str]:
    """Private names that a file defines."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else ""
        if _is_private(name):
            yield name


def _edges(sources: list[Source]) -> dict[str, list[str]]:
    """Who imports whom, ours only. Imports for the type checker alone are left out: public names load lazily."""
    names = {source.module for source in sources}
    edges: dict[str, list[str]] = {}
    for source in sources:
        targets = [item.target for item in imports_of(source) if not item.type_checking]
        known = [target if target in names else target.rpartition(".")[0] for target in targets]
        edges[source.module] = [target for target in known if target in names and target != source.module]
    return edges


def cycles(sources: list[Source]) -> Iterator[str]:
    """Import cycles."""
    edges = _edges(sources)
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> Iterator[str]:
        if module in trail:
            yield " -> ".join((*trail[trail.index(module) :], module))
        elif module not in done:
            for target in edges[module]:
                yield from walk(target, (*trail, module))
            done.add(module)

    for module in sorted(edges):
        yield from walk(module, ())


def too_deep(sources: list[Source]) -> Iterator[str]:
    """The longest chain of imports, in modules of ours with both ends counted, past its limit.

    Counted over every file of the four folders. `fusedvit/__init__.py` loads public names lazily and is part of a
    chain only where a file imports it; the empty `__init__.py` of a subpackage is in none.
    """
    if any(cycles(sources)):
        return  # no chain is longest there
    chain = longest_chain(sources)
    if len(chain) > MAX_DEPTH:
        yield f"{len(chain)} modules deep, at most {MAX_DEPTH}: {' -> '.join(chain)}"


def longest_chain(sources: list[Source]) -> tuple[str, ...]:
    """Modules that import one another, the importing one first."""
    edges = _edges(sources)

    @cache
    def below(module: str) -> tuple[str, ...]:
        return (module, *max((below(target) for target in edges[module]), key=len, default=()))

    return max((below(module) for module in sorted(edges)), key=len, default=())


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


def too_many(sources: list[Source]) -> Iterator[str]:
    """Folders with more Python files than a reader takes in."""
    files = Counter(path.rpartition("/")[0] for path in (source.path for source in sources) if "__init__" not in path)
    for folder, count in files.items():
        limit = MAX_FOLDERS.get(folder, MAX_FOLDER)
        if count > limit:
            yield f"{folder}: {count} files, at most {limit}"


def text_files(root: Path) -> Iterator[Path]:
    """Sources, tests, docs and settings that somebody reads."""
    for top in TOPS:
        for path in sorted((root / top).rglob("*")) if (root / top).is_dir() else [root / top]:
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path


def machine_traces(root: Path) -> Iterator[str]:
    """Lines that hold an absolute path of some machine, or the address of a package registry."""
    for path in text_files(root):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := MACHINE.search(line):
                yield f"{path.relative_to(root).as_posix()}:{number}: {match.group()}"


def missing_pages(root: Path) -> Iterator[str]:
    """Mentions of a page of docs/ that is not there."""
    for path in text_files(root):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for page in re.findall(r"\bdocs/[\w.-]+\.md\b", line):
                if not (root / page).exists():
                    yield f"{path.relative_to(root).as_posix()}:{number}: {page}"
