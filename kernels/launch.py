"""A launcher that costs half of Triton's own from the second launch on.

Triton's launcher works out every argument's specialisation at every launch: 20 us on the host, and an encoder call
takes 140 launches. What decides the machine code is a short key here, so the compiled kernel is looked up and run
directly. Launch hooks (profilers) still see every launch.
"""

import copy
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], "Loaded"] = {}
_compiling_only: ContextVar[bool] = ContextVar("fusedvit_compiling_only", default=False)


class Loaded:
    """A compiled kernel, loaded on the device that was current then.

    Programmatic dependent launch is an attribute of a launch and not of the code: with and without it the same compiled
    kernel runs.
    """

    __slots__ = ("_constants", "_function", "_kernel", "_metadata", "_run")

    def __init__(self, kernel: Any, constants: dict[str, Any], pdl: bool = False) -> None:
        self._kernel = kernel
        self._constants = tuple(constants.values())
        self._run = kernel.run  # loads it
        self._function, self._metadata = kernel.function, kernel.packed_metadata
        if pdl and hasattr(self._run, "launch_pdl"):  # else: slower, and right
            self._run = copy.copy(self._run)
            self._run.launch_pdl = True

    def launch(self, programs: int, arguments: Iterable[Any], on: torch.cuda.Stream | None = None) -> None:
        """Launches it on a one-dimensional grid.

        Args:
            programs: size of the grid.
            arguments: all but the constants.
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
        """Its PTX."""
        text: str = self._kernel.asm["ptx"]
        return text


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within it `launch` compiles and does not launch. Compilations run in parallel; leaving waits for them.

    One that fails raises nothing here; it fails again at its first real launch.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        token = _compiling_only.set(True)
        try:
            yield
        finally:
            _compiling_only.reset(token)


def only_compiling() -> bool:
    """Whether this runs within `compiling_only`: code that launches without `launch` must not then."""
    return _compiling_only.get()


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
        descriptors: tensor descriptors of Triton or Gluon, whose dtype and block shape decide the code; or tensors,
            where there is no copy engine (see `tma.descriptor`).
        pointers: tensors; dtype and alignment to 16 bytes decide the code.
        constants: compile-time arguments by name, in the kernel's order.
        options: `num_warps`, `num_stages`, `maxnreg`; `launch_pdl`, which decides no code.
        scalars: 32-bit integers for which the kernel is not specialised.

    Returns:
        The kernel, to be launched again where nothing that decides the code differs; None within `compiling_only` and
        in Triton's interpreter.
    """
    last = pointers[-1]
    decides: list[Any] = [kernel.fn, None if last is None else last.device, *constants.values(), *options.values()]
    for descriptor in descriptors:
        if descriptor is None or isinstance(descriptor, torch.Tensor):
            _add_pointer(decides, descriptor)
        else:  # Triton's or Gluon's; its layout follows from dtype and block shape
            decides += (descriptor.base.dtype, *descriptor.block_shape)
    for pointer in pointers:
        _add_pointer(decides, pointer)
    key = tuple(decides)
    compiled = _compiled.get(key)
    if compiled is not None:
        # Of a tensor Triton asks the driver for the device, which an address saves. One on the CPU it is to refuse.
        addresses = [p if p is None or not p.is_cuda else p.data_ptr() for p in pointers]
        compiled.launch(programs, (*descriptors, *addresses, *scalars))
        return compiled
    names = kernel.arg_names[len(descriptors) + len(pointers) + len(scalars) :]
    assert list(constants) == list(names), f"{kernel.__name__} takes {names}, got {list(constants)}"
    # Fused multiply-adds are on explicitly: versions of Triton differ in their default.
    named = constants | options | {"enable_fp_fusion": True}
    pdl = bool(named.pop("launch_pdl", False))
    arguments = *descriptors, *pointers, *scalars
    only = only_compiling()
    run = partial(kernel.warmup, grid=(programs,)) if pdl or only else kernel[(programs,)]
    built = run(*arguments, **named)
    if built is None or only:  # the interpreter compiles nothing
        return None
    compiled = _compiled[key] = Loaded(built, constants, pdl)
    if pdl:  # Triton's own launcher would launch without
        compiled.launch(programs, arguments)
    return compiled


def _add_pointer(decides: list[Any], t: torch.Tensor | None) -> None:
    decides += (None, None) if t is None else (t.dtype, t.data_ptr() % 16 == 0)
