"""Kernels that were compiled ahead of time: the folder that `fusedvit compile` fills, and its use at run time.

The folder has the layout of Triton's cache, plus a manifest. If the environment variable `FUSEDVIT_KERNELS` names the
folder, each kernel is linked into Triton's own cache, so that the folder may be read-only and lie anywhere.
"""

import atexit
import contextlib
import ctypes
import errno
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path, PurePath
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import get_ptxas_version

from fusedvit import __version__
from fusedvit.errors import attempted, from_json, named_line, passes
from fusedvit.kernels import tile_configs
from fusedvit.kernels.launch import cache_folder
from fusedvit.kernels.tile_configs import Target

logger = logging.getLogger("fusedvit")

VARIABLE, MANIFEST = "FUSEDVIT_KERNELS", "manifest.json"
POLL_SECONDS = 0.05
KEPT = {".cubin", ".ptx", ".json"}  # files of a kernel to keep: Triton loads the cubin, our checks read the PTX
PR_SET_PDEATHSIG = 1
GROUP = "__grp__"  # prefix of the file in which Triton's cache lists a kernel's files


def manifest(gpu: str, target: Target, towers: Sequence[str], dtype: str, kernels: int) -> dict[str, Any]:
    """The manifest of a folder of compiled kernels."""
    return {
        "triton": triton.__version__,
        "ptxas": _ptxas(target),
        "fusedvit": __version__,
        "sources": _sources(),
        "gpu": {"name": gpu, "capability": target.capability, "sms": target.num_sms},
        "towers": list(towers),
        "dtype": dtype,
        "kernels": kernels,
    }


def _ptxas(target: Target) -> str:
    """The build of ptxas that kernels' cache keys name: Triton reads it once per process."""
    version: str = get_ptxas_version(target.capability)
    return version.strip().rpartition("\n")[2]


@cache
def _sources() -> str:
    """A digest of the kernels' source code, on which their cache keys depend. Raises OSError if it cannot be read."""
    folder = Path(tile_configs.__file__).parent
    found = list(_python_files(folder))
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no Python files", str(folder))
    return hashlib.sha256(b"".join(found)).hexdigest()


def _python_files(folder: Path) -> Iterator[bytes]:
    """What the Python files within `folder` hold, which may be in an archive: a zipapp, or a wheel on sys.path. Raises
    OSError if that is no archive any more."""
    archive = next(filter(Path.is_file, folder.parents), None)
    if archive is None:
        yield from (path.read_bytes() for path in sorted(folder.rglob("*.py")))
        return
    inside = folder.relative_to(archive)
    try:
        with zipfile.ZipFile(archive) as opened:
            paths = {PurePath(name) for name in opened.namelist()}
            for path in sorted(path for path in paths if path.suffix == ".py" and path.is_relative_to(inside)):
                yield opened.read(path.as_posix())
    except zipfile.BadZipFile as error:  # replaced since this process began
        raise OSError(f"{archive}: {error}") from error


def fill(
    folder: Path, compilations: Sequence[Callable[[], Any]], processes: int, step: Callable[[str, int, int], None]
) -> list[str]:
    """Runs `compilations` in parallel forked processes with `folder` as Triton's cache; returns a line per failure.

    Args:
        step: called with (what, how many are done, of how many) after each compilation.

    Raises:
        OSError: the machine fails (a full disk, no compiler): the other kernels would fail too.
    """
    context = multiprocessing.get_context("fork")
    following, said = context.Value("i", 0), context.SimpleQueue()

    def work() -> None:
        end_with_parent()
        triton.knobs.cache.dir = str(folder.absolute())
        while True:
            with following.get_lock():
                index = following.value
                following.value += 1
            if index >= len(compilations):
                return
            try:
                build_launcher(compilations[index]())
                said.put("")
            except Exception as error:  # a compiler may raise anything, and must not stop the other kernels
                said.put(_of_machine(error, folder) or named_line(error))

    workers = [context.Process(target=work, daemon=True) for _ in range(min(processes, len(compilations)))]
    for worker in workers:
        worker.start()
    problems: list[str] = []
    for done in range(len(compilations)):
        problems.append(_said_by(workers, said))
        step("compiled", done + 1, len(compilations))
    for worker in workers:
        worker.join()
    _prune(folder)
    return [problem for problem in problems if problem]


def _of_machine(error: Exception, folder: Path) -> OSError | None:
    """The error as one that can be pickled and names a file, if the system raised it."""
    if not isinstance(error, OSError) or not error.errno:
        return None
    return OSError(error.errno, error.strerror, error.filename or str(folder))


def _said_by(workers: Sequence[Any], said: Any) -> str:
    """Waits for the next compilation and returns how it failed, or "". Raises the machine's OSError."""
    while said.empty() and any(worker.is_alive() for worker in workers):
        time.sleep(POLL_SECONDS)
    found: str | OSError = "a compiling process was killed" if said.empty() else said.get()
    if isinstance(found, str):
        return found
    for worker in workers:
        worker.terminate()
    raise found


def end_with_parent() -> None:
    """Has Linux kill this process when the thread that forked it ends, for whatever reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_kernels(device: torch.device) -> None:
    """Enters the kernels of the folder that `FUSEDVIT_KERNELS` names into Triton's cache, once per process, device and
    cache.

    Logs a warning if the folder does not match this machine. If the system cannot read or write now, the next call
    tries again. Nothing is raised: missing kernels are compiled here.
    """
    named = os.environ.get(VARIABLE)
    if named and device.type == "cuda":
        folder, cache, on = Path(named).absolute(), cache_folder(), torch.device("cuda", device.index or 0)
        failed = attempted(lambda: _is_usable(folder, on) and _enter_somewhere(folder, cache), OSError)
        if isinstance(failed, OSError):
            logger.warning("fusedvit: the compiled kernels in %s are not used: %s", named, failed)


@lru_cache(maxsize=64)
def _is_usable(folder: Path, device: torch.device) -> bool:
    """Whether any of a folder's kernels are for `device`; a warning says what does not match.

    Raises:
        OSError: the system cannot read now, and may later: nothing is kept.
    """
    found = attempted(lambda: _read(folder, device), OSError, ValueError, KeyError, TypeError)
    if isinstance(found, Exception):
        _raise_if_passing(found)
        found = f"{MANIFEST} is not readable: {type(found).__name__}: {found}", False
    said, usable = found
    if said:
        logger.warning("fusedvit: the compiled kernels in %s: %s. What is missing is compiled here", folder, said)
    return usable


def _raise_if_passing(error: Exception) -> None:
    if isinstance(error, OSError) and passes(error):
        raise error


def _read(folder: Path, device: torch.device) -> tuple[str, bool]:
    """`mismatch` of the folder's manifest. Raises OSError, ValueError, KeyError or TypeError if it is unreadable."""
    found = from_json((folder / MANIFEST).read_text(encoding="utf-8"))
    os.listdir(folder)  # an unreadable folder fails here, before any cache is replaced
    return mismatch(found, Target.of(device))


@lru_cache(maxsize=64)
def _enter_somewhere(folder: Path, cache: str) -> None:
    """Enters kernels into Triton's `cache`; if that is not writable or not set, into a temporary cache in its place.

    Raises:
        OSError: the temporary cache is not writable either.
    """
    if cache and not isinstance(attempted(lambda: enter(folder, Path(cache)), OSError), OSError):
        return
    own = Path(tempfile.mkdtemp(prefix="fusedvit-kernels-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    enter(folder, own)
    triton.knobs.cache.dir = str(own)


def mismatch(found: dict[str, Any], target: Target) -> tuple[str, bool]:
    """(What in the manifest `found` does not match `target`, or ""; whether any of its kernels are still usable).

    Raises:
        OSError: the system cannot read the kernels' sources now, and may later.
    """
    gpu = found["gpu"]
    if found["triton"] != triton.__version__:
        return f"compiled with Triton {found['triton']}, this is {triton.__version__}", False
    if gpu["capability"] != target.capability:
        return f"compiled for {gpu['name']} (sm_{gpu['capability']}), this is sm_{target.capability}", False
    sources = attempted(_sources, OSError)
    if isinstance(sources, OSError):
        _raise_if_passing(sources)
        return f"the kernels' sources, with which it is compared, cannot be read: {sources}", False
    if found["sources"] != sources:
        return f"compiled from the kernels of fusedvit {found['fusedvit']}, these are others ({__version__})", False
    if found["ptxas"] != _ptxas(target):
        said = f"compiled with ptxas {found['ptxas']!r}, this process has {_ptxas(target)!r}"
        return f"{said} (torch.compile sets TRITON_PTXAS_PATH when it first compiles: fuse before)", False
    if gpu["sms"] != target.num_sms:
        return f"chosen for {gpu['name']} with {gpu['sms']} SMs, this GPU has {target.num_sms}", True
    return "", True


def enter(folder: Path, into: Path) -> int:
    """Links every kernel of `folder` into `into`, a Triton cache; returns how many were new.

    Existing files stay. Damaged kernels are counted in a warning. Raises OSError if `into` is not writable.
    """
    entered, damaged = 0, list[str]()
    kinds = OSError, ValueError, LookupError, TypeError, AttributeError
    for source in (folder / name for name in sorted(os.listdir(folder)) if os.path.isdir(folder / name)):
        files = attempted(partial(_to_enter, source), *kinds)
        if isinstance(files, Exception):
            _raise_if_passing(files)
            damaged.append(f"{source.name}: {type(files).__name__}: {files}")
            continue
        for name, content in files.items():
            target = into / source.name / name
            if not (_is_whole(target) if name.startswith(GROUP) else target.exists()):
                _write(target, content)
                entered += name.startswith(GROUP)
    if damaged:
        logger.warning(
            "fusedvit: %d of the compiled kernels in %s are damaged, and compiled here; the first is %s",
            *(len(damaged), folder, damaged[0]),
        )
    return entered


def _to_enter(source: Path) -> dict[str, bytes]:
    """File name -> content of what one kernel's folder adds to a cache: launchers, then lists that point to its files.

    Raises:
        OSError, ValueError, LookupError, TypeError, AttributeError: the folder is not as `fill` left it.
    """
    found: dict[str, bytes] = {}
    for name in sorted(os.listdir(source), key=lambda name: name.startswith(GROUP)):
        if name.startswith(GROUP):
            children = from_json((source / name).read_text(encoding="utf-8"))["child_paths"].keys()
            for child in children:
                with open(source / child, "rb"):
                    pass
            found[name] = json.dumps({"child_paths": {child: str(source / child) for child in children}}).encode()
        elif name.endswith(".so"):
            found[name] = (source / name).read_bytes()
    return found


def _prune(folder: Path) -> None:
    """Removes the compiler's intermediate files, four fifths of the bytes."""
    for group in folder.glob(f"*/{GROUP}*.json"):
        children = from_json(group.read_text(encoding="utf-8"))["child_paths"]
        kept = {name: path for name, path in children.items() if Path(name).suffix in KEPT}
        _write(group, json.dumps({"child_paths": kept}).encode())
        for path in children.keys() - kept.keys():
            (group.parent / path).unlink(missing_ok=True)


def build_launcher(kernel: Any) -> None:
    """Compiles the launcher of `kernel`: up to Triton 3.6 it is C code, and its binary is kept in the cache too.

    The launcher is linked to the driver's library. Without a driver, an empty library takes its place: the binary in
    the cache is the same, and only loading it here fails.
    """
    if not hasattr(nvidia, "make_launcher"):
        return
    with tempfile.TemporaryDirectory() as stub, triton.knobs.nvidia.scope():
        if not triton.knobs.nvidia.libcuda_path and not _has_driver():
            command = ["cc", "-shared", "-x", "c", os.devnull, "-o", f"{stub}/libcuda.so.1"]
            subprocess.run(command, check=True, capture_output=True)
            triton.knobs.nvidia.libcuda_path = stub
        log = logging.getLogger("triton.runtime.build")  # it would report each cached launcher that does not load
        log.addFilter(_nothing)
        try:
            with contextlib.suppress(ImportError):
                nvidia.CudaLauncher(kernel.src, kernel.metadata)
        finally:
            log.removeFilter(_nothing)
            if triton.knobs.nvidia.libcuda_path == stub:  # Triton caches the path, but this folder is removed
                nvidia.libcuda_dirs.cache_clear()
                nvidia.library_dirs.cache_clear()


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _has_driver() -> bool:
    try:
        return bool(nvidia.libcuda_dirs())
    except (AssertionError, OSError, subprocess.SubprocessError):
        return False


def _is_whole(group: Path) -> bool:
    """Whether a kernel is in Triton's cache with all its files; `group` is the file that lists them."""
    try:
        children = from_json(group.read_text(encoding="utf-8"))["child_paths"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return bool(children) and all(os.path.exists(path) for path in children.values())


def _write(path: Path, content: bytes) -> None:
    """Writes a file atomically, as another process may write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{uuid.uuid4().hex}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
