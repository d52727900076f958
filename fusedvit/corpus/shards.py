"""Embeddings on disk, in shards that appear whole or not at all.

    OUT/job.json             what the shards are made from; a resumed job must agree with it
    OUT/shard-00017/
        index.parquet        a row per input: id, grid, dtype, offset, rows, error
        rows.safetensors     "rows", [all rows of the shard, width]

A shard is written into a folder whose name begins with a dot, and renamed once it is on the disk: the rename commits
it. So a listing shows what is committed, a reader never sees half a file, and two writers of one shard leave one. A
writer locks its unfinished folder until it ends or dies; unfinished folders without a lock are removed.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fusedvit.corpus import resuming
from fusedvit.errors import InputError, as_input_error, first_line, from_json, of_folder

JOB, INDEX, ROWS = "job.json", "index.parquet", "rows.safetensors"
_PREFIX, _UNFINISHED = "shard-", ".unfinished-"
_ATTEMPTS = 3
_FORGOTTEN = 24 * 3600  # seconds after which an unfinished file counts as abandoned, where there are no locks


@dataclass(frozen=True)
class Embedded:
    """The result for one input.

    Attributes:
        id: the input's name.
        rows: `[n, width]` on the CPU: one row if embeddings are pooled, else one per merged token; None on an error.
        grid_thw: frames, and rows and columns of patches; zeros on an error.
        error: what was wrong with the input, or "".
    """

    id: str
    rows: torch.Tensor | None
    grid_thw: tuple[int, int, int] = (0, 0, 0)
    error: str = ""


class Failed(NamedTuple):
    """An input with an error."""

    shard: int
    id: str
    error: str


def holds_job(out: Path) -> bool:
    """Whether a job was started in the folder."""
    return (out / JOB).is_file()


def start(out: Path, job: dict[str, Any]) -> None:
    """Creates the folder of a job, or checks that an existing one is of the same job. Several may start at once.

    Raises:
        InputError: the folder cannot be written, holds other files, or holds the shards of another job.
    """
    known = out / JOB
    try:
        out.mkdir(parents=True, exist_ok=True)
        if known.is_file():
            check(out, job)
        remove_unfinished(out)  # also of a start that was killed before it wrote `JOB`
        if not known.is_file():
            others = [path for path in out.iterdir() if not path.name.startswith(_UNFINISHED)]
            if others and not known.is_file():  # else another start was faster
                raise InputError(f"{out}: not empty, and no job of `fusedvit embed` (it holds no {JOB})")
            _write_new(known, json.dumps(job, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise InputError(f"{out}: cannot be used as output: {of_folder(error)}") from None
    check(out, job)


def check(out: Path, job: dict[str, Any], part: bool = False) -> None:
    """Raises InputError if the shards of a folder are of another job; `part`: only what `job` holds is compared."""
    with as_input_error(f"{out}: cannot be used as output: {JOB}", OSError, ValueError):
        known = from_json((out / JOB).read_text(encoding="utf-8"))
    if not isinstance(known, dict):
        raise InputError(f"{out / JOB}: no job of `fusedvit embed`")
    differs = resuming.difference(known, (known if part else {}) | json.loads(json.dumps(job)))
    if differs:
        raise InputError(f"{out}: {differs}")


@contextlib.contextmanager
def in_use(out: Path) -> Iterator[None]:
    """A context in which a job works on the folder: a shared lock on `JOB` keeps others from `abandon`.

    Raises:
        InputError: another start has removed `JOB` meanwhile.
    """
    with as_input_error(f"{out}: {JOB} is gone, start again", OSError):
        file = (out / JOB).open("rb")
    with file:
        if not _lock(file.fileno(), shared=True, otherwise=True) or not holds_job(out):
            raise InputError(f"{out}: {JOB} was taken back by a start that failed; start again")
        yield


def abandon(out: Path, job: dict[str, Any]) -> None:
    """Undoes a `start` without results by removing `JOB`, so that the folder is free for another job.

    `JOB` stays if it is another job's, if a shard is committed, if another process works on the folder, or if the file
    system has no locks to tell.
    """
    with contextlib.suppress(OSError, ValueError), (out / JOB).open("r+b") as file:
        is_ours = from_json(file.read()) == json.loads(json.dumps(job))
        if is_ours and _lock(file.fileno()) and not committed(out):
            (out / JOB).unlink(missing_ok=True)


def remove_unfinished(out: Path) -> None:
    """Removes the unfinished files of killed writers. Those that a living writer has locked stay; a writer whose folder
    is removed before it could lock it starts over (`commit`)."""
    for path in out.glob(f"{_UNFINISHED}*"):
        # another start was faster, or the file system has no locks
        with contextlib.suppress(OSError), _opened(path) as handle:
            if not _lock(handle, otherwise=time.time() - path.stat().st_mtime > _FORGOTTEN):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of a file or folder, which is closed at the end of the context."""
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int, shared: bool = False, otherwise: bool = False) -> bool:
    """Locks an open file or folder until it is closed or its process ends; False if another process has locked it.
    Returns `otherwise` where there are no locks."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return otherwise
    return True


def committed(out: Path) -> set[int]:
    """Numbers of the committed shards."""
    names = (path.name.removeprefix(_PREFIX) for path in out.glob(f"{_PREFIX}*"))
    return {int(name) for name in names if name.isdecimal() and _is_whole(_folder(out, int(name)))}


def commit(out: Path, number: int, found: Sequence[Embedded], width: int, dtype: torch.dtype) -> bool:
    """Writes shard `number`; returns False if another writer has committed it first: that shard stays.

    Raises:
        InputError: the disk is full or cannot be written; committed shards are untouched.
    """
    for left in reversed(range(_ATTEMPTS)):
        unfinished: Path | None = None
        try:
            unfinished = _new_folder(out)
            with _opened(unfinished) as handle:
                if not _lock(handle, shared=True, otherwise=True) and left:
                    continue  # another start has locked it first and removes it: see `remove_unfinished`
                _write(unfinished, found, width, dtype)
                return _renamed(unfinished, out, number)
        except (OSError, SafetensorError) as error:
            removed = unfinished is not None and out.is_dir() and not unfinished.exists()
            if not (removed and left):
                raise InputError(f"{out}: shard {number} cannot be written: {first_line(error)}") from None
        finally:
            if unfinished is not None:
                shutil.rmtree(unfinished, ignore_errors=True)
    raise AssertionError("the last attempt returns or raises")


def _new_folder(out: Path) -> Path:
    """A folder for a shard being written, with the umask's permissions: `mkdtemp` would keep other users out."""
    folder = out / f"{_UNFINISHED}{uuid.uuid4().hex}"
    folder.mkdir()
    return folder


def _renamed(unfinished: Path, out: Path, number: int) -> bool:
    """Commits a written folder by renaming it; False if another writer was faster."""
    folder = _folder(out, number)
    for left in reversed(range(_ATTEMPTS)):
        try:
            unfinished.rename(folder)
            break
        except OSError:  # a folder that is not empty is never replaced
            if _is_whole(folder):
                return False
            if _is_half(folder) and left:
                shutil.rmtree(folder, ignore_errors=True)
            elif os.path.lexists(folder):
                raise OSError(f"{folder} is in the way; remove it") from None
            else:
                raise
    _sync(out)
    return True


def read(out: Path, number: int) -> list[Embedded]:
    """The inputs of one committed shard, in the order of the job.

    Raises:
        InputError: there is no such shard, or it cannot be read.
    """
    import pyarrow.parquet

    folder = _folder(Path(out), number)
    with as_input_error(f"{folder}: does not read"):  # parquet and safetensors raise many types for damaged files
        index = pyarrow.parquet.read_table(folder / INDEX).to_pylist()
        with safe_open(folder / ROWS, framework="pt") as file:
            rows = file.get_tensor("rows")
    found = []
    for row in index:
        part = None if row["error"] else rows[row["offset"] : row["offset"] + row["rows"]]
        found.append(Embedded(row["id"], part, (row["t"], row["h"], row["w"]), row["error"]))
    return found


def check_committed(out: Path, number: int, ids: Sequence[str]) -> None:
    """Raises InputError if a committed shard cannot be read or is not of the inputs `ids`; its tensor is not read."""
    import pyarrow.parquet

    folder = _folder(out, number)
    try:
        index = pyarrow.parquet.read_table(folder / INDEX)
        with safe_open(folder / ROWS, framework="pt") as file:
            rows = file.get_slice("rows").get_shape()[0]
        known = index["id"].to_pylist()
        wrong = "" if len(known) == len(ids) else f"{len(ids)} inputs expected, got {len(known)}"
        others = (f"input {mine!r} expected, got {its!r}" for mine, its in zip(ids, known, strict=False) if mine != its)
        wrong = wrong or next(others, "")
        ends = index["offset"][-1].as_py() + index["rows"][-1].as_py() if known else 0
        wrong = wrong or ("" if rows == ends else f"{ends} rows expected, got {rows}")
    except Exception as error:  # as in `read`
        wrong = f"does not read: {first_line(error)}"
    if wrong:
        raise InputError(f"{folder}: {wrong}; remove it, and it is made again")


def count(out: Path, number: int) -> tuple[int, int]:
    """How many inputs a committed shard has, and how many have an error. Raises InputError as `read` does."""
    said = _columns(out, number, "error")
    return len(said), sum(map(any, said))


def failed(out: Path, numbers: Iterable[int], most: int) -> list[Failed]:
    """The first inputs of committed shards with an error, in the job's order. Raises InputError as `read` does."""
    found: list[Failed] = []
    for number in sorted(committed(out) & set(numbers)):
        if len(found) >= most:
            break
        found += [Failed(number, name, error) for name, error in _columns(out, number, "id", "error") if error]
    return found[:most]


def _columns(out: Path, number: int, *names: str) -> list[tuple[Any, ...]]:
    """Columns of a shard's index, one tuple per row."""
    import pyarrow.parquet

    with as_input_error(f"{_folder(out, number)}: does not read"):  # as in `read`
        table = pyarrow.parquet.read_table(_folder(out, number) / INDEX, columns=[*names])
        return list(zip(*(table[name].to_pylist() for name in names), strict=True))


def _folder(out: Path, number: int) -> Path:
    return out / f"{_PREFIX}{number:05d}"


def _is_whole(folder: Path) -> bool:
    """Whether a folder holds both files of a shard."""
    return (folder / INDEX).is_file() and (folder / ROWS).is_file()


def _is_half(folder: Path) -> bool:
    """Whether a folder holds only some of a shard's files, as an interrupted copy leaves it."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} < {INDEX, ROWS}


def _write(folder: Path, found: Sequence[Embedded], width: int, dtype: torch.dtype) -> None:
    import pyarrow
    import pyarrow.parquet

    parts = [torch.empty(0, width, dtype=dtype, device="cpu") if e.rows is None else e.rows.to(dtype) for e in found]
    counts = [len(part) for part in parts]
    columns: dict[str, list[Any]] = {
        "id": [e.id for e in found],
        **{name: [e.grid_thw[i] for e in found] for i, name in enumerate("thw")},
        "dtype": [str(dtype).removeprefix("torch.")] * len(found),
        "offset": [0, *accumulate(counts)][:-1],
        "rows": counts,
        "error": [e.error for e in found],
    }
    rows = torch.cat([torch.empty(0, width, dtype=dtype, device="cpu"), *parts])
    save_file({"rows": rows.contiguous()}, folder / ROWS)
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / INDEX)
    with contextlib.suppress(PermissionError):  # some file systems refuse changes of modes
        shutil.copymode(folder / INDEX, folder / ROWS)  # safetensors ignores the umask and keeps other users out
    for path in (folder / ROWS, folder / INDEX, folder):
        _sync(path)


def _sync(path: Path) -> None:
    """Waits until a file, or a folder's listing, is on the disk."""
    with _opened(path) as handle:
        os.fsync(handle)


def _write_new(path: Path, text: str) -> None:
    """Writes a file that appears whole; if another has appeared meanwhile, that one stays."""
    for left in reversed(range(_ATTEMPTS)):
        other = path.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}-{path.name}")
        try:
            with other.open("x", encoding="utf-8") as file:
                _lock(file.fileno(), shared=True)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                _link(other, path)
            _sync(path.parent)
            return
        except FileNotFoundError:  # another start has removed it before it was locked
            if not left:
                raise
        finally:
            other.unlink(missing_ok=True)


def _link(whole: Path, path: Path) -> None:
    """Gives the file `whole` the name `path`, unless another file has it."""
    try:
        os.link(whole, path)
    except FileExistsError:
        return
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        if not path.exists():
            whole.replace(path)
