"""Tuning tables: what was measured to be fastest, one JSON file per GPU, never executed, only read.

    {"passport": {"gpu": …, "triton": "3.6", "torch": "2.11.0", "sources": {"linear/triton": hash, …}},
     "entries": [{"op": "linear", "kind": "norm+rope", "n": 3456, "k": 1152, "rows": 1024, "dtype": "bfloat16",
                  "backend": "triton", "config": {…}, "us": 15.2}, …]}

Shipped ones are in kernels/configs/; a user's own, in the cache directory, is put over the shipped one entry by entry.
A table that is malformed, or was measured on another Triton, is left out with a warning; so is, by itself, every backend
whose sources have changed since, or that is a library's of another PyTorch. That a shipped one is for another Triton or
PyTorch is nobody's fault, and no warning. Sizes are looked up as they are: no entry, no answer.
"""

import ast
import hashlib
import inspect
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from fusedvit.kernels import backends
from fusedvit.kernels.backends import BACKENDS, Backend, Key
from fusedvit.kernels.tile_configs import Target

logger = logging.getLogger("fusedvit")

SHIPPED = Path(__file__).resolve().parent / "tuned"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def minor(version: str) -> str:
    """The first two numbers: of "3.6.0" "3.6"."""
    return ".".join(version.split(".")[:2])


TRITON, TORCH = minor(triton.__version__), minor(torch.__version__)


class TableError(ValueError):
    """A file that is no tuning table; the message says where and what."""


@dataclass(frozen=True)
class Table:
    """Configurations by what they were tuned for.

    Attributes:
        entries: what holds here.
        stale: what was left out, and why: forms, or everything.
        elsewhere: all of that, as it was made with another Triton, or another PyTorch's libraries.
    """

    entries: Mapping[Key, Any] = field(default_factory=dict)
    stale: tuple[str, ...] = ()
    elsewhere: bool = False

    def over(self, other: "Table") -> "Table":
        """Both, this one first where they answer the same question."""
        return Table({**other.entries, **self.entries}, (*self.stale, *other.stale))

    def find(self, key: Key, target: Target, dtype: torch.dtype) -> Any | None:
        """The configuration for `key`, if there is one and its backend runs on `target`."""
        config = self.entries.get(key)
        if config is None:
            return None
        backend = backends.backend_of(config)
        absent = backends.why_unavailable(backend, target, dtype) or backend.wrong(config, target, dtype)
        return None if absent else config


def file_name(gpu: str) -> str:
    """The table's file for a GPU by the driver's name: "NVIDIA H200" -> "nvidia-h200.json"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def user_folder() -> Path:
    """Where a user's own tables lie: `$XDG_CACHE_HOME/fusedvit/configs`, ~/.cache without it."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "fusedvit" / "tuned"


def table_for(target: Target) -> Table:
    """The table of `target`'s GPU; an empty one where there is none. Read once a process, see `forget`."""
    return _read_all(target.name, SHIPPED, user_folder()) if target.name else Table()


def forget() -> None:
    """Tables are read again when next needed: one was written."""
    _read_all.cache_clear()


_STALE = "tuning table %s: %s; heuristics used instead. `fusedvit tune` makes it anew"


@lru_cache(maxsize=16)
def _read_all(gpu: str, shipped: Path, own: Path) -> Table:
    """Logged once each, as the answer is kept; what is stale says whose it is."""
    whole = Table()
    for whose, folder in (("shipped", shipped), ("own", own)):
        path = folder / file_name(gpu)
        if not path.is_file():
            continue
        try:
            table = read(path, gpu)
        except (TableError, OSError) as error:
            logger.warning("tuning table left out, heuristics used instead: %s", error)
            continue
        level = logging.INFO if table.elsewhere and folder == shipped else logging.WARNING
        for reason in table.stale:
            logger.log(level, _STALE, path, reason)
        signed = tuple(f"{whose} tuning table: {reason}" for reason in table.stale)
        whole = replace(table, stale=signed).over(whole)
    return whole


def read(path: Path, gpu: str) -> Table:
    """The table at `path`, of which stale forms are left out, or everything if it was made with another Triton.

    Raises:
        TableError: not a table, of another GPU, or an entry that cannot be.
        OSError: not readable.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: not JSON: {error}") from error
    passport = _member(document, "passport", dict, str(path))
    found = _member(passport, "gpu", str, f"{path}: passport")
    if file_name(found) != file_name(gpu):
        raise TableError(f"{path}: made on {found!r}, this is {gpu!r}")
    made_on = _member(passport, "triton", str, f"{path}: passport")
    if made_on != TRITON:
        return Table({}, (f"made with Triton {made_on}, this is {TRITON}",), elsewhere=True)
    sources = _member(passport, "sources", dict, f"{path}: passport")
    changed, foreign = stale_forms(sources, str(passport.get("torch")))
    reasons = {backend: f"the sources of {backend} have changed since" for backend in changed}
    reasons |= {backend: f"{backend} was measured with another PyTorch than {TORCH}" for backend in foreign}
    entries, dropped = {}, set[str]()
    for i, entry in enumerate(_member(document, "entries", list, str(path))):
        key, config, backend = _entry(entry, f"{path}: entry {i}")
        if backend in reasons:
            dropped.add(backend)
        elif config is not None:
            entries[key] = config
    return Table(entries, tuple(reasons[backend] for backend in sorted(dropped)), bool(dropped) and dropped <= foreign)


def stale_forms(sources: Mapping[str, Any], made_with: str) -> tuple[set[str], set[str]]:
    """(Forms whose sources are no longer these, other forms that belong to libraries of another PyTorch than the one
    that it was `made_with`), as "op/backend"."""
    names = {f"{backend.op}/{backend.name}": backend for backend in BACKENDS}
    changed = {name for name, backend in names.items() if sources.get(name) != fingerprint(backend)}
    return changed, set()


def _entry(entry: Any, where: str) -> tuple[Key, Any | None, str]:
    """(key, configuration, "op/backend"); no configuration for a backend that this version does not know."""
    key = Key(**{f.name: _member(entry, f.name, _TYPES[f.type], where) for f in fields(Key)})
    if key.dtype not in DTYPES:
        raise TableError(f"{where}: dtype must be one of {sorted(DTYPES)}, got {key.dtype!r}")
    name = _member(entry, "backend", str, where)
    record = _member(entry, "config", dict, where)
    backend = backends.named(key.op, name)
    return key, None if backend is None else config_of(backend, record, where), f"{key.op}/{name}"


_TYPES: dict[Any, type] = {"str": str, "int": int, "bool": bool, str: str, int: int, bool: bool}


def config_of(backend: Backend, record: dict[str, Any], where: str) -> Any:
    """A configuration of `backend` from plain values.

    Raises:
        TableError: a field that is unknown, missing or of another type.
    """
    known = {f.name: f for f in fields(backend.config)}
    unknown = sorted(set(record) - set(known))
    if unknown:
        raise TableError(f"{where}: {backend.config.__name__} has no {', '.join(unknown)}; it has {', '.join(known)}")
    values = {name: _member(record, name, _TYPES[known[name].type], where) for name in record}
    try:
        return backend.config(**values)
    except (TypeError, ValueError) as error:  # what the record itself refuses
        raise TableError(f"{where}: {error}") from error


def _member(value: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise TableError(f"{where}: expected {name!r}")
    found = value[name]
    if type(found) is not kind:
        raise TableError(f"{where}: {name} must be {kind.__name__}, got {type(found).__name__}")
    return found


@lru_cache(maxsize=64)
def fingerprint(backend: Backend) -> str:
    """A hash of the code behind `backend`, blind to comments, docstrings and layout."""
    digest = hashlib.sha256()
    for module in backend.modules:
        tree = ast.parse(inspect.getsource(module))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        digest.update(ast.unparse(tree).encode())
    return digest.hexdigest()[:16]
