"""Kernels with planted faults, compiled for sm_90; prints a line per probe: its name, a tab, what the checks say.

A program of its own: it must run without the interpreter that the tests need.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from fusedvit.bench.ahead_of_time import compile_or_fail
from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.hopper.gluon_compat import barrier, gl, gluon
from fusedvit.kernels.launch import KernelJob, launch, record
from fusedvit.kernels.linear import linear
from fusedvit.kernels.tile_configs import LinearConfig
from fusedvit.kernels.tma import descriptor


@triton.jit
def narrow_vector(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + rows, tl.load(x_ptr + rows * 1152, mask=rows < n), mask=rows < n)


@triton.jit
def wide_vector(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    tl.store(out_ptr + rows, tl.load(x_ptr + rows * 1152, mask=rows < n), mask=rows < n)


@triton.jit
def narrow_scalar(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(out_ptr + cols, tl.load(x_ptr + tl.program_id(0) * 1152 + cols))


@triton.jit
def wide_scalar(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(out_ptr + cols, tl.load(x_ptr + tl.program_id(0).to(tl.int64) * 1152 + cols))


@triton.jit
def spills(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, 512 * BLOCK)  # 512 values a thread, all alive in the middle
    x = tl.load(x_ptr + cols)
    tl.store(out_ptr + cols, x * tl.sum(x, 0))


@triton.jit
def no_tensor_cores(x_desc, out_ptr, n, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, 64), tl.sum(x_desc.load([0, 0]).to(tl.float32), 1))


@triton.jit
def broken(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, 3), 0.0)  # 3 is no power of two


@gluon.jit
def gluon_narrow(x_ptr, out_ptr, n, BLOCK: gl.constexpr):
    rows = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out_ptr + rows, gl.load(x_ptr + rows * 1152, mask=rows < n), mask=rows < n)


@gluon.jit
def gluon_wide(x_ptr, out_ptr, n, BLOCK: gl.constexpr):
    rows = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    x = gl.load(x_ptr + rows.to(gl.int64) * 1152, mask=rows < n)
    barrier()
    gl.store(out_ptr + rows, x, mask=rows < n)


def product_in_six_stages() -> dict[object, KernelJob]:
    """A shipped kernel in a configuration that asks for 6 x 48 KiB of shared memory."""
    x, weight, out = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((512, 512),) * 3)
    rows = torch.empty(1, dtype=torch.int32, device="meta")
    return record(lambda: linear(x, weight, rows, out, Epilogue(), LinearConfig(128, 256, 64, 8, 6)))


def main() -> None:
    x = torch.empty(1, device="meta")
    desc = descriptor(torch.empty(64, 64, dtype=torch.bfloat16, device="meta"), 64, 64)
    found = {"shared": product_in_six_stages()}
    kernels = (narrow_vector, wide_vector, narrow_scalar, wide_scalar, spills, no_tensor_cores, broken)
    for kernel in (*kernels, gluon_narrow, gluon_wide):
        descriptors, pointers = ((desc,), (x,)) if kernel is no_tensor_cores else ((), (x, x))
        given = (kernel, 1, descriptors, pointers, {"BLOCK": 128}, {"num_warps": 4}, (5,))
        found[kernel.__name__] = record(partial(launch, *given))
    for name, jobs in found.items():
        (job,) = jobs.values()
        print(name, "; ".join(compile_or_fail(job, 90).problems), sep="\t")


if __name__ == "__main__":
    main()
