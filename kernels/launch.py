"""Launching a kernel twice costs half as much the second time.

Triton's own launcher works out an argument's specialisation at every launch, 20 us on the host; an encoder call makes
140 launches. What decides the machine code is known here in a few words, so a compiled kernel is kept under them and
called directly, as Triton itself keeps compiled kernels per function; past the record of the launch, too, which Triton
makes for hooks, unless there are any.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], "Loaded"] = {}
_compiling_only: ContextVar[bool] = ContextVar("fusedvit_compiling_only", default=False)


class Loaded:
    """A compiled kernel on the device that was current when it was made."""

    __slots__ = ("_constants", "_function", "_kernel", "_metadata", "_run")

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._constants = tuple(constants.values())
        self._run = kernel.run  # loads it
        self._function, self._metadata = kernel.function, kernel.packed_metadata

    def launch(self, programs: int, arguments: Iterable[Any], on: torch.cuda.Stream | None = None) -> None:
        """Launches it on a one-dimensional grid, `on` a stream or the current one; `arguments` are all but the
        constants."""
        begin, end = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if getattr(begin, "calls", begin) or getattr(end, "calls", end):  # such as Triton's profiler
            there = {} if on is None else {"stream": on.cuda_stream}
            self._kernel[(programs, 1, 1)](*arguments, *self._constants, **there)
            return
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()) if on is None else on.cuda_stream
        hooks = None, None, None
        run, function, metadata = self._run, self._function, self._metadata
        run(programs, 1, 1, stream, function, metadata, *hooks, *arguments, *self._constants)

    def ptx(self) -> str:
        """Its code as handed to the assembler."""
        text: str = self._kernel.asm["ptx"]
        return text


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, `launch` compiles and launches nothing; all compilations run side by side, and leaving waits for them.

    One that fails is silent here and fails again at its first real launch.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        token = _compiling_only.set(True)
        try:
            yield
        finally:
            _compiling_only.reset(token)


def only_compiling() -> bool:
    """Whether this is inside `compiling_only`: then whoever launches past `launch` does not."""
    return _compiling_only.get()


def launch(
    kernel: JITFunction,
    programs: int,
    boxes: tuple[Any, ...],
    pointers: tuple[torch.Tensor | None, ...],
    constants: dict[str, Any],
    options: dict[str, int],
    scalars: tuple[int, ...] = (),
) -> Loaded | None:
    """Launches `kernel` on a one-dimensional grid, and returns what to launch again where the same words decide.

    Args:
        kernel: its parameters are `boxes`, `pointers`, `scalars` and `constants`, in this order.
        programs: size of the grid.
        boxes: tensor descriptors of Triton or Gluon, whose dtype and box decide the code, or tensors (see
            `descriptor.box`).
        pointers: tensors; dtype and alignment to 16 bytes decide the code.
        constants: compile-time arguments by name, in the kernel's order.
        options: `num_warps`, `num_stages`, `maxnreg`.
        scalars: integers of 32 bits for which the kernel is not specialised.
    """
    last = pointers[-1]
    words: list[Any] = [kernel.fn, None if last is None else last.device, *constants.values(), *options.values()]
    for box in boxes:
        if box is None or isinstance(box, torch.Tensor):
            _add_pointer(words, box)
        else:  # a descriptor, Triton's or Gluon's; its layout follows from dtype and box
            words += (box.base.dtype, *box.block_shape)
    for pointer in pointers:
        _add_pointer(words, pointer)
    key = tuple(words)
    compiled = _compiled.get(key)
    if compiled is not None:
        # For a tensor Triton would ask the driver where it lies; one that lies elsewhere it is to find, and refuse.
        addresses = [p if p is None or not p.is_cuda else p.data_ptr() for p in pointers]
        compiled.launch(programs, (*boxes, *addresses, *scalars))
        return compiled
    names = kernel.arg_names[len(boxes) + len(pointers) + len(scalars) :]
    assert list(constants) == list(names), f"{kernel.__name__} takes {names}, got {list(constants)}"
    # Fused multiply-adds are asked for: versions of Triton differ in what they default to.
    named = constants | options | {"enable_fp_fusion": True}
    if only_compiling():
        kernel.warmup(*boxes, *pointers, *scalars, grid=(programs,), **named)
        return None
    found = kernel[(programs,)](*boxes, *pointers, *scalars, **named)
    if found is None:  # the interpreter compiles nothing
        return None
    compiled = _compiled[key] = Loaded(found, constants)
    return compiled


def _add_pointer(words: list[Any], t: torch.Tensor | None) -> None:
    words += (None, None) if t is None else (t.dtype, t.data_ptr() % 16 == 0)
