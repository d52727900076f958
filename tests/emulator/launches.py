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
from triton.runtime.jit import JITFunction

from fusedvit.kernels import codegen_checks
from tests.emulator.machine import Launch, Machine
from tests.emulator.memory import GlobalMemory
from tests.emulator.program import Code, translate
from tests.emulator.ptx import Program, parse
from tests.emulator.tma import tensor_map

Change = Callable[[Program], None]


@cache
def _built(launch: codegen_checks.Launch) -> tuple[str, int, tuple[Any, ...]]:
    """(PTX, bytes of shared memory, what is said of its tensor maps)."""
    built = codegen_checks.build(launch, 90)
    return built.asm["ptx"], int(built.metadata.shared), tuple(built.metadata.tensordesc_meta or ())


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
    machine = Machine(**settings)

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = codegen_checks.launch_of(self, args, kwargs)
        ptx, shared, metas = _built(launch)
        by_name = dict(zip(self.arg_names, args, strict=False)) | kwargs
        values = [by_name[name] for name, kind in launch.signature if kind != "constexpr"]
        passed = tuple(_expanded(values, iter(metas)))
        tensors, early = _tensors(values), warmup  # so `kernels.launch` builds what it then launches with PDL
        known = {t.untyped_storage().data_ptr() for t in ready or ()}
        unready = [t for t in tensors if early and ready is not None and t.untyped_storage().data_ptr() not in known]
        machine.run(Launch(_code(ptx, change), grid[0], passed, shared, early), GlobalMemory(tensors, unready))

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
