"""Tuning tables: the fastest configuration measured for each operation and size, one JSON file per GPU model.

    {
     "passport": {"gpu": "NVIDIA H200", "triton_version": "3.6.0", "torch": "2.11.0", "fusedvit": "0.2.0",
                  "backends": {"linear/hopper": 1, "attention/triton": 1, …}},
     "entries": [
      {"op": "linear", "kind": "norm+rope", "n": 3456, "k": 1152, "rows": 1024, "dtype": "bfloat16",
       "backend": "hopper", "config": {…}, "us": 15.2, "heuristic_us": 15.9},
      …
     ]
    }

Shipped tables lie in kernels/tuned; the user's own, in the cache directory, override them entry by entry. A lookup is
exact: a size without an entry is left to the heuristics.

An entry holds as long as its backend has the recorded version (`Backend.version`): entries of another version are left
out and reported, entries of a backend that does not exist here are ignored. The versions of Triton, PyTorch and
fusedvit are recorded but not compared. One table serves every supported Triton; a configuration that a newer one cannot
compile well is refused by the backend's own check (`Backend.wrong`). A malformed table is left out with a warning.
"""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
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
Entry = dict[str, Any]  # one of a document's "entries"
on_forget: list[Callable[[], None]] = []  # called by `forget`


class TableError(ValueError):
    """A file that is no tuning table; the message says where and why."""


@dataclass(frozen=True)
class Table:
    """Tuned configurations by their keys.

    Attributes:
        entries: the configurations that hold here.
        stale: why others were left out, one text per table and backend.
    """

    entries: Mapping[Key, Any] = field(default_factory=dict)
    stale: tuple[str, ...] = ()

    def over(self, other: "Table") -> "Table":
        """The entries of both tables; where both have a key, this table's."""
        return Table({**other.entries, **self.entries}, (*self.stale, *other.stale))

    def find(self, key: Key, target: Target, dtype: torch.dtype) -> Any | None:
        """The configuration tuned for `key`; None if there is none, or it cannot run on `target`."""
        config = self.entries.get(key)
        if config is None:
            return None
        backend = backends.backend_of(config)
        problem = backends.why_unavailable(backend, target, dtype) or backend.wrong(key, config, target, dtype)
        return None if problem else config


def file_name(gpu: str) -> str:
    """The table's file name for a GPU by the driver's name: "NVIDIA H200" -> "nvidia-h200.json"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def user_folder() -> Path:
    """Where the user's own tables lie: `$XDG_CACHE_HOME/fusedvit/tuned`, under ~/.cache without it.

    A user without a home (a number, without HOME) has them under a folder named "~", as Triton has its cache.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "fusedvit" / "tuned"


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def table_for(target: Target) -> Table:
    """The table of `target`'s GPU, empty if there is none. Read once per process, see `forget`."""
    try:
        return _read_all(target.name, SHIPPED, user_folder()) if target.name else Table()
    except OSError as error:
        if isinstance(error, TimeoutError) and error.errno is None:  # a signal's handler raised it
            raise
        logger.warning("fusedvit: tuning tables cannot be read for now, heuristics used instead: %s", error)
        return Table()


def forget() -> None:
    """Makes the next `table_for` read the files again, and drops choices that were made by the old ones."""
    _read_all.cache_clear()
    for drop in on_forget:
        drop()


@lru_cache(maxsize=16)
def _read_all(gpu: str, shipped: Path, own: Path) -> Table:
    """The shipped table with the user's own over it. Cached, so each warning is logged once.

    Raises:
        OSError: the system cannot read a file now, and may later: nothing is cached.
    """
    both = Table()
    if not os.path.isdir(shipped):  # as in a zipapp
        logger.warning("fusedvit: heuristics used instead of the shipped tuning tables: %s is not a folder", shipped)
    for whose, folder in (("shipped", shipped), ("own", own)):
        path = folder / file_name(gpu)
        if not os.path.isfile(path):  # raises nothing, if the folder is forbidden
            continue
        try:
            table = read(path, gpu)
        except (TableError, PermissionError) as error:
            logger.warning("fusedvit: tuning table left out, heuristics used instead: %s", error)
            continue
        for reason in table.stale:
            logger.log(
                logging.WARNING if whose == "own" else logging.INFO,  # a user can only renew his own
                "fusedvit: tuning table %s: %s; heuristics used instead. `fusedvit tune` measures it anew",
                path,
                reason,
            )
        stale = tuple(f"{whose} tuning table: {reason}" for reason in table.stale)
        both = Table(table.entries, stale).over(both)
    return both


def read(path: Path, gpu: str) -> Table:
    """The table at `path`, without the entries of backends whose version has changed.

    Raises:
        TableError: the file is no table, is of another GPU, or has an invalid entry.
        OSError: the file cannot be read.
    """
    document = _document(path)
    found = document["passport"]["gpu"]
    if file_name(found) != file_name(gpu):
        raise TableError(f"{path}: measured on {found!r}, this is {gpu!r}")
    versions, entries, changed = document["passport"]["backends"], dict[Key, Any](), dict[str, str]()
    for i, entry in enumerate(document["entries"]):
        where = f"{path}: entry {i}"
        key, backend = key_of(entry, where), _backend(entry, where)
        if backend is None:
            continue
        if versions.get(backend.id) != backend.version:
            changed[backend.id] = f"version {versions.get(backend.id)} of {backend.id}, this is {backend.version}"
            continue
        entries[key] = config_of(backend, _member(entry, "config", dict, where), where)
    return Table(entries, tuple(changed[name] for name in sorted(changed)))


def _document(path: Path) -> dict[str, Any]:
    """The JSON at `path`, checked to have "entries" and a "passport" with "gpu" and "backends"."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TableError(f"{path}: not JSON: {error}") from error
    passport = _member(document, "passport", dict, str(path))
    _member(passport, "gpu", str, f"{path}: passport")
    _member(passport, "backends", dict, f"{path}: passport")
    _member(document, "entries", list, str(path))
    return document


def key_of(entry: Any, where: str) -> Key:
    """The key of an entry.

    Raises:
        TableError: a field is missing or of another type; the message begins with `where`.
    """
    key = Key(**{f.name: _member(entry, f.name, f.type, where) for f in fields(Key)})
    if key.dtype not in DTYPES:
        raise TableError(f"{where}: dtype must be one of {sorted(DTYPES)}, got {key.dtype!r}")
    return key


def _backend(entry: Any, where: str) -> Backend | None:
    """The backend of an entry; None if it does not exist here, as it was deleted or is of a newer fusedvit."""
    return backends.backend_named(_member(entry, "op", str, where), _member(entry, "backend", str, where))


def config_of(backend: Backend, record: dict[str, Any], where: str) -> Any:
    """A configuration of `backend` from plain values.

    Raises:
        TableError: a field is unknown, missing or of another type.
    """
    known = {f.name: f for f in fields(backend.config)}
    unknown = sorted(set(record) - set(known))
    if unknown:
        raise TableError(f"{where}: {backend.config.__name__} has no {', '.join(unknown)}; it has {', '.join(known)}")
    values = {name: _member(record, name, known[name].type, where) for name in record}
    try:
        return backend.config(**values)
    except (TypeError, ValueError) as error:  # the dataclass itself refuses a value
        raise TableError(f"{where}: {error}") from error


def _member(value: Any, name: str, kind: Any, where: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise TableError(f"{where}: expected {name!r}")
    found = value[name]
    if type(found) is not kind:
        raise TableError(f"{where}: {name} must be {kind.__name__}, got {type(found).__name__}")
    return found


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def passport(gpu: str, fusedvit: str) -> dict[str, Any]:
    """The passport of a new table: its GPU, and the versions that it was measured with.

    Args:
        gpu: the driver's name of the GPU.
        fusedvit: version of the package.
    """
    versions = {"triton_version": triton.__version__, "torch": torch.__version__, "fusedvit": fusedvit}
    return {"gpu": gpu, **versions, "backends": {backend.id: backend.version for backend in BACKENDS}}


def entry_of(key: Key, config: Any, **measured: float) -> Entry:
    """One entry of a table: `config` is the fastest for `key`, `measured` are its times in microseconds."""
    return {**asdict(key), "backend": backends.backend_of(config).name, "config": asdict(config), **measured}


def write(path: Path, document_passport: dict[str, Any], entries: Sequence[Entry], decided: Iterable[Key] = ()) -> None:
    """Writes a table, one entry per line, in one step: a process that dies meanwhile leaves the old file.

    Entries of an existing table are kept if their backend still has the version that they were measured with, and if
    their key is neither in `entries` nor in `decided` (keys whose heuristic choice is as fast now).
    """
    kept = {key_of(entry, str(path)): entry for entry in _valid_entries(path)}
    for key in decided:
        kept.pop(key, None)
    kept |= {key_of(entry, "new entry"): entry for entry in entries}
    lines = ",\n".join("  " + json.dumps(entry) for entry in kept.values())
    text = f'{{\n "passport": {json.dumps(document_passport)},\n "entries": [\n{lines}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text, encoding="utf-8")
    try:
        unfinished.replace(path)
    except OSError as error:
        if error.errno != errno.EBUSY:  # a file that is a mount of its own cannot be replaced, only written
            raise
        shutil.copyfile(unfinished, path)
        unfinished.unlink()
    forget()


def _valid_entries(path: Path) -> list[Entry]:
    """The entries at `path` whose backend has the version that they were measured with; none if `path` is no table."""
    if not path.exists():
        return []
    try:
        document = _document(path)
        found = [(entry, _backend(entry, str(path))) for entry in document["entries"]]
    except TableError as error:
        logger.warning("fusedvit: tuning table replaced: %s", error)
        return []
    versions = document["passport"]["backends"]
    return [entry for entry, backend in found if backend is not None and versions.get(backend.id) == backend.version]
