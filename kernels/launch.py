"""Launches kernels at half the cost of Triton's launcher, and finds kernels that other processes have compiled.

Triton's launcher works out every argument's specialisation at every launch: 20 us on the host, and an encoder call
takes 140 launches. Here a short key holds all that determines the machine code; the compiled kernel is looked up by it
and run directly. Launch hooks (profilers) still see every launch.

Triton's cache on disk holds a compiled kernel under a key computed from the launch. A `KernelJob` is a launch without
its tensors, small enough for a pipe; compiled in any process, it gets the same key. Within `FromCache` a launch takes
its kernel from the cache; if it is not there, the job is noted and nothing is compiled.
"""

import copy
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.cache import FileCacheManager, get_cache_manager
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], "Loaded"] = {}
ALIGNMENT = 16  # bytes: Triton generates other code for pointers that are multiples of it


class Loaded:
    """A compiled kernel, loaded on the device that was current when this object was created.

    Programmatic dependent launch is an attribute of a launch and not of the code: with and without it the same compiled
    kernel runs.
    """

    __slots__ = ("_constants", "_function", "_kernel", "_metadata", "_run")

    def __init__(self, kernel: Any, constants: dict[str, Any], pdl: bool = False) -> None:
        self._kernel = kernel
        self._constants = tuple(constants.values())
        self._run = kernel.run  # loads it
        self._function, self._metadata = kernel.function, kernel.packed_metadata
        if pdl and hasattr(self._run, "launch_pdl"):  # without that attribute: slower, but correct
            self._run = copy.copy(self._run)
            self._run.launch_pdl = True

    def launch(self, programs: int, arguments: Iterable[Any], on: torch.cuda.Stream | None = None) -> None:
        """Launches the kernel on a one-dimensional grid.

        Args:
            programs: size of the grid.
            arguments: all arguments but the constants.
            on: a stream; None for the current one.
        """
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()) if on is None else on.cuda_stream
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        hooks: tuple[Any, ...] = None, None, None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # such as Triton's profiler
            given = (*arguments, *self._constants)
            hooks = self._kernel.launch_metadata((programs, 1, 1), stream, *given), enter, leave
        run, function, metadata = self._run, self._function, self._metadata
        run(programs, 1, 1, stream, function, metadata, *hooks, *arguments, *self._constants)

    def ptx(self) -> str:
        """The kernel's PTX."""
        text: str = self._kernel.asm["ptx"]
        return text


class KernelMissing(Exception):
    """A launch within `FromCache` whose kernel is not compiled yet."""


class KernelFailed(RuntimeError):
    """A launch within `FromCache` whose kernel could not be compiled. Like the compiler's own error, it leads to
    another backend if there is one."""


@dataclass(frozen=True)
class _Pointer:
    """The facts that Triton reads from a tensor to compile for it; compiling processes have no PyTorch."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class Argument:
    """The facts about a pointer or a tensor descriptor that determine a kernel's code.

    Attributes:
        aligned: the address is a multiple of `ALIGNMENT`.
        descriptor: the descriptor's class; None for a pointer.
        layout: the layout of a Gluon descriptor.
    """

    dtype: torch.dtype
    aligned: bool = True
    descriptor: type | None = None
    block_shape: tuple[int, ...] = ()
    layout: Any = None

    @staticmethod
    def of(given: Any) -> "Argument | None":
        """The argument for a tensor or a descriptor; None for None."""
        if given is None:
            return None
        if isinstance(given, torch.Tensor):
            return Argument(given.dtype, given.data_ptr() % ALIGNMENT == 0)
        layout = getattr(given, "layout", None)
        return Argument(given.base.dtype, True, type(given), tuple(given.block_shape), layout)

    def stand_in(self) -> Any:
        """An object that Triton treats like the tensor or descriptor that this was made of."""
        base = _Pointer(self.dtype, 0 if self.aligned else 1)
        if self.descriptor is None:
            return base
        built: Any = object.__new__(self.descriptor)
        built.base, built.block_shape = base, list(self.block_shape)
        built.shape, built.strides = [1] * len(self.block_shape), [1] * len(self.block_shape)
        if self.layout is not None:
            built.layout = self.layout
        return built


@dataclass(frozen=True)
class KernelJob:
    """A launch without its tensors, which can be pickled.

    Attributes:
        module, name: the kernel's module and name.
        arguments: all arguments but the constants, in the kernel's order; 32-bit integers as they are.
        constants, options: as in `launch`.
    """

    module: str
    name: str
    arguments: tuple[Argument | int | None, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    @staticmethod
    def of(
        kernel: JITFunction, given: Iterable[Any], constants: dict[str, Any], options: dict[str, Any]
    ) -> "KernelJob":
        """The job of a launch on the tensors, descriptors and integers `given`."""
        arguments = tuple(x if isinstance(x, int) else Argument.of(x) for x in given)
        return KernelJob(kernel.fn.__module__, kernel.fn.__name__, arguments, constants, options)

    @property
    def code(self) -> tuple[Any, ...]:
        """What determines the machine code: all but the values of integers, for which nothing is specialised."""
        arguments = tuple(int if isinstance(a, int) else a for a in self.arguments)
        return self.module, self.name, arguments, *self.constants.items(), *self.options.items()

    def kernel(self) -> JITFunction:
        """The kernel that is launched."""
        found: JITFunction = getattr(importlib.import_module(self.module), self.name)
        return found

    def build(self) -> Any:
        """Compiles the kernel for the target of Triton's active driver; None within `FromCache` if none is cached."""
        stand_ins = [a.stand_in() if isinstance(a, Argument) else a for a in self.arguments]
        return self.kernel().run(*stand_ins, grid=(1,), warmup=True, **self.constants, **self.options)


class FromCache(triton.AsyncCompileMode):
    """A context in which launches take their kernels from Triton's cache on disk; none is compiled.

    It is one of Triton's compile modes: Triton calls `submit`, with the key, for a kernel that this process does not
    have yet.

    Attributes:
        collect: launches are noted and not run. Without it, the first launch whose kernel is not in the cache raises
            `KernelMissing`, or `KernelFailed` if the kernel is one of `failed`.
        jobs: launches of a collection, by what determines their code.
        missing: jobs of kernels that are not in the cache, by their keys' digests, which name folders of the cache.
        digest: the digest of the last requested kernel's key.
        pause: called at each launch of a collection.
    """

    def __init__(
        self, collect: bool, pause: Callable[[], None] = lambda: None, failed: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Nothing is missing yet.

        Args:
            pause: see above.
            failed: why kernels cannot be compiled, by their keys' digests.
        """
        super().__init__(None)  # no executor: nothing is compiled
        self.collect = collect
        self.jobs: dict[object, KernelJob] = {}
        self.missing: dict[str, KernelJob] = {}
        self.digest = ""
        self.pause = pause
        self._failed = failed
        self._job: KernelJob | None = None

    def begin(self, key: object, job: Callable[[], KernelJob]) -> None:
        """Called before a kernel's first launch in this process; `key` determines its code."""
        if not self.collect:
            self._job = job()
            return
        self.pause()
        if key not in self.jobs:
            self.jobs[key] = job()

    def find(self, job: KernelJob) -> Any:
        """The kernel of `job`, not loaded on a device yet; None if it is not in the cache."""
        self._job = job
        hash_sources(job.kernel(), self.pause, set())
        return job.build()

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None], *_: Any) -> Any:
        """Triton's request for a kernel that this process does not have; `compile_fn` reads a cached one."""
        assert self._job is not None, "Triton is asked for a kernel outside `launch`"
        self.digest = hashlib.sha256(key.encode()).hexdigest()
        if is_cached(self.digest, self._job.name):
            kernel = compile_fn()
            finalize_fn(kernel)
            return kernel
        self.missing[self.digest] = self._job
        if self.collect:
            return None
        if self.digest in self._failed:
            raise KernelFailed(self._failed[self.digest])
        raise KernelMissing(self._job.name)


def is_cached(digest: str, name: str) -> bool:
    """Whether Triton's cache holds the kernel of this key, with the files that Triton needs: others may delete some."""
    name = name[:150]  # as Triton cuts it
    try:
        files = get_cache_manager(digest).get_group(f"{name}.json") or {}
        return files.keys() >= {f"{name}.json", f"{name}.cubin"}
    except (OSError, RuntimeError, UnicodeError) as error:  # the cache's folder cannot be made or named
        if isinstance(error, TimeoutError) and error.errno is None:  # a signal's handler raised it
            raise
        return False


def cache_folder() -> str:
    """The folder of Triton's cache; "" if there is none, or if its name is not UTF-8, as which Triton reads it in every
    locale, or cannot be written in the locale of now."""
    try:
        folder = knobs.cache.dir or ""
        os.fsencode(folder)
    except UnicodeError:
        return ""
    return folder


def forget_damaged(digest: str, name: str) -> None:
    """Removes the list of a kernel's files if some were deleted: Triton would read the others instead of compiling."""
    if not is_cached(digest, name):
        with suppress(OSError, RuntimeError):
            os.unlink(os.path.join(getattr(get_cache_manager(digest), "cache_dir", ""), f"__grp__{name[:150]}.json"))


_from_cache: ContextVar[FromCache | None] = ContextVar("fusedvit_from_cache", default=None)


def from_cache() -> FromCache | None:
    """The `FromCache` that the current thread is in; None outside any."""
    return _from_cache.get()


def hash_sources(kernel: JITFunction, pause: Callable[[], None], above: set[str]) -> None:
    """Hashes a kernel's source for its key, after the sources of the functions that it names, pausing in between.

    Triton would hash all of them at once, in 35 ms. Keys depend on the order of hashing: before any key is needed, this
    function must run.
    """
    if kernel.hash is not None or kernel.__name__ in above:
        return
    above.add(kernel.__name__)
    for name in kernel.fn.__code__.co_names:
        named = kernel.fn.__globals__.get(name)
        if isinstance(named, JITFunction):
            hash_sources(named, pause, above)
    pause()
    _ = kernel.cache_key


def pause() -> None:
    """Lets other threads run, by the `pause` of the `FromCache` that the current thread is in, if any."""
    mode = from_cache()
    if mode is not None:
        mode.pause()


@contextmanager
def loading_from_cache(mode: FromCache) -> Iterator[FromCache]:
    """A context in which `mode` handles the launches of this thread."""
    token = _from_cache.set(mode)
    try:
        with mode:
            yield mode
    finally:
        _from_cache.reset(token)


def record(run: Callable[[], object]) -> dict[object, KernelJob]:
    """The job of each distinct kernel that `run()` would launch, by what determines its code, in order of first use.
    Nothing is launched; tensors may be on the meta device."""
    with loading_from_cache(FromCache(collect=True)) as mode:
        run()
    found: dict[object, KernelJob] = {}
    for job in mode.jobs.values():
        found.setdefault(job.code, job)
        hash_sources(job.kernel(), lambda: None, set())
    return found


def private_cache(folder: str) -> type[FileCacheManager]:
    """A manager for Triton's cache of now, which can only be read: kernels that it lacks are kept in `folder`.

    Set it as `triton.knobs.cache.manager_class`. It leaves other folders that become Triton's cache as they are.
    """
    read_only = cache_folder()

    class PrivateCache(FileCacheManager):
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            cache = cache_folder()
            if override or dump or cache != read_only or _is_whole(os.path.join(cache, key)):
                super().__init__(key, override, dump)
                return
            self.key, self.cache_dir = key, os.path.join(folder, key)
            self.lock_path = os.path.join(self.cache_dir, "lock")
            os.makedirs(self.cache_dir, exist_ok=True)

    return PrivateCache


def _is_whole(folder: str) -> bool:
    """Whether a kernel's folder has the file that is written last: the list of its files, or a launcher."""
    try:
        return any(name.startswith("__grp__") or name.endswith(".so") for name in os.listdir(folder))
    except OSError as error:
        if error.errno is None:  # none of the system's: a signal's handler raised it
            raise
        return False


def launch(
    kernel: JITFunction,
    programs: int,
    descriptors: tuple[Any, ...],
    pointers: tuple[torch.Tensor | None, ...],
    constants: dict[str, Any],
    options: dict[str, int],
    scalars: tuple[int, ...] = (),
) -> Loaded | None:
    """Launches `kernel` on a one-dimensional grid.

    Args:
        kernel: its parameters are `descriptors`, `pointers`, `scalars` and `constants`, in this order.
        programs: size of the grid.
        descriptors: tensor descriptors of Triton or Gluon, whose dtype and block shape determine the code; or tensors,
            where there is no copy engine (see `tma.descriptor`).
        pointers: tensors; dtype and alignment to 16 bytes determine the code.
        constants: compile-time arguments by name, in the kernel's order.
        options: `num_warps`, `num_stages`, `maxnreg`; `launch_pdl`, which does not change the code.
        scalars: 32-bit integers for which the kernel is not specialised.

    Returns:
        The kernel, for further launches that need the same code; None in a collection of `FromCache` and in Triton's
        interpreter.

    Raises:
        KernelMissing: within `FromCache`; nothing was launched.
    """
    placed = pointers[-1]
    if placed is None:
        placed = next((p for p in pointers if p is not None), None)
    device = None if placed is None else placed.device
    decides: list[Any] = [kernel.fn, device, *constants.values(), *options.values()]
    for descriptor in descriptors:
        if descriptor is None or isinstance(descriptor, torch.Tensor):
            _add_pointer(decides, descriptor)
        else:  # Triton's or Gluon's; its layout follows from dtype and block shape
            decides += (descriptor.base.dtype, *descriptor.block_shape)
    for pointer in pointers:
        _add_pointer(decides, pointer)
    key = tuple(decides)
    mode = from_cache()
    collected = mode is not None and mode.collect  # then some tensors may have no memory
    compiled = None if collected else _compiled.get(key)
    if compiled is not None:
        # For a tensor Triton asks the driver which device it is on; an address saves that. A CPU tensor stays a tensor,
        # so that Triton refuses it.
        addresses = [p if p is None or not p.is_cuda else p.data_ptr() for p in pointers]
        compiled.launch(programs, (*descriptors, *addresses, *scalars))
        return compiled
    return _first_launch(kernel, key, programs, (*descriptors, *pointers, *scalars), constants, options)


def _first_launch(
    kernel: JITFunction,
    key: tuple[Any, ...],
    programs: int,
    given: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, int],
) -> Loaded | None:
    """A launch by Triton's own launcher; `key` determines the code."""
    names = kernel.arg_names[len(given) :]
    assert list(constants) == list(names), f"{kernel.__name__} takes {names}, got {list(constants)}"
    # Fused multiply-adds are on explicitly: versions of Triton differ in their default. Fingerprints overflow on
    # purpose, which TRITON_DEBUG=1 would take for an error, and end all work on the GPU.
    named = options | {"enable_fp_fusion": True, "sanitize_overflow": False}
    pdl = bool(named.pop("launch_pdl", False))
    mode = from_cache()
    if mode is not None:
        mode.begin(key, partial(KernelJob.of, kernel, given, constants, named))
        if mode.collect:
            return None
    if isinstance(kernel, JITFunction):  # and not Triton's interpreter's
        hash_sources(kernel, lambda: None, set())
    run = partial(kernel.warmup, grid=(programs,)) if pdl else kernel[(programs,)]
    built = run(*given, **constants, **named)
    if built is None and knobs.runtime.jit_cache_hook is not None:
        raise RuntimeError(f"{kernel.__name__} is not launched: triton.knobs.runtime.jit_cache_hook says so")
    if built is None:  # the interpreter compiles nothing
        return None
    compiled = _compiled[key] = Loaded(built, constants, pdl)
    if pdl:  # Triton's own launcher would launch without PDL
        compiled.launch(programs, given)
    return compiled


def _add_pointer(decides: list[Any], t: torch.Tensor | None) -> None:
    decides += (None, None) if t is None else (t.dtype, t.data_ptr() % 16 == 0)
