"""Launches of this process's kernels, compiled for sm_90 and run by the emulator on tensors in the CPU's memory.

    with emulated() as machine:
        attention(qkv, segments, out, heads, head_dim, config)  # the host function, as it stands

In a process without `TRITON_INTERPRET`. The grid has one dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from fusedvit.kernels import codegen_checks
from fusedvit.kernels.launch import KernelJob
from tests.emulator.machine import Launch, Machine
from tests.emulator.memory import GlobalMemory
from tests.emulator.program import Code, translate
from tests.emulator.ptx import Program, parse
from tests.emulator.tma import tensor_map

Change = Callable[[Program], None]


_built: dict[object, CompiledKernel] = {}  # by `KernelJob.code`


@cache
def _code(ptx: str, change: Change | None) -> Code:
    program = parse(ptx)
    if change is not None:
        change(program)
    return translate(program)


@contextmanager
def emulated(
    change: Change | None = None, ready: Sequence[torch.Tensor] | None = None, **settings: Any
) -> Iterator[Machine]:
    """Inside, kernels run on a `Machine` of these settings.

    Args:
        change: made to a program before.
        ready: of a programmatic dependent launch, what it may touch before it has waited; None for all.
    """
    machine, compiling = Machine(**settings), JITFunction.run

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        constants = {name: kwargs.pop(name) for name in self.arg_names[len(args) :]}
        job = KernelJob.of(self, args, constants, kwargs)
        if job.code not in _built:
            with mock.patch.object(JITFunction, "run", compiling):
                _built[job.code] = codegen_checks.build(job, 90)
        built = _built[job.code]
        values = [value for value in args if value is not None]
        passed = tuple(_expanded(values, iter(built.metadata.tensordesc_meta or ())))
        tensors, early = _tensors(values), warmup  # so `kernels.launch` builds what it then launches with PDL
        known = {t.untyped_storage().data_ptr() for t in ready or ()}
        unready = [t for t in tensors if early and ready is not None and t.untyped_storage().data_ptr() not in known]
        launch = Launch(_code(built.asm["ptx"], change), grid[0], passed, int(built.metadata.shared), early)
        machine.run(launch, GlobalMemory(tensors, unready))

    with mock.patch.object(JITFunction, "run", run):
        yield machine


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "block_shape")


def _expanded(values: list[Any], metas: Iterator[Any]) -> Iterator[Any]:
    """Parameters as Triton's launcher passes them; at the end what it adds, which our kernels do not use."""
    for value in values:
        if _is_descriptor(value):
            yield tensor_map(value, next(metas))
            yield from (int(n) for n in value.shape)
            yield from (int(s) for s in value.strides)
        else:
            yield value.data_ptr() if isinstance(value, torch.Tensor) else value
    yield from (0, 0)


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    bases = [value.base if _is_descriptor(value) else value for value in values]
    found = [getattr(base, "tensor", base) for base in bases]
    return [t for t in found if isinstance(t, torch.Tensor)]
