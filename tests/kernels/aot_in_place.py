"""Run by test_aot.py without the interpreter: prints what `compile_in_place` leaves a launch to compile, as JSON;
after `compiling_only` nothing may be left."""

import json
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from fusedvit.bench.ops import compiling_only
from fusedvit.kernels.codegen_checks import AbsentGPU, Compiled, compile_in_place
from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.linear import _linear_kernel, linear
from fusedvit.kernels.tile_configs import LinearConfig


def product() -> torch.Tensor:
    x, weight, out = (torch.empty(256, 256, dtype=torch.bfloat16) for _ in range(3))
    rows = torch.zeros(1, dtype=torch.int32)
    return linear(x, weight, rows, out, Epilogue(activation="gelu_tanh"), LinearConfig(64, 64, 64, 4, 3))


def compile_only(kernel: JITFunction, run: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """A launch on no GPU: nothing comes back that could be loaded, and launched again."""
    run(kernel, *args, grid=grid, warmup=True, **named)


def main() -> None:
    triton.runtime.driver.set_active(AbsentGPU(90))
    known: dict[object, Compiled] = {}
    first = compile_in_place(product, 90, known)
    kept = len(list(Path(triton.knobs.cache.dir).iterdir()))
    again = compile_in_place(product, 90, known)
    _linear_kernel.device_caches.clear()  # as in another process
    with mock.patch.object(JITFunction, "run", partialmethod(compile_only, JITFunction.run)):
        product()
    later = len(list(Path(triton.knobs.cache.dir).iterdir()))
    _linear_kernel.device_caches.clear()
    triton.knobs.cache.dir += "/of_a_context"
    with compiling_only():
        product()
        within = len(list(Path(triton.knobs.cache.dir).glob("*")))
    after = len(list(Path(triton.knobs.cache.dir).glob("*")))
    with (
        mock.patch.object(JITFunction, "run", partialmethod(compile_only, JITFunction.run)),
        mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled again")),
    ):
        product()
    context = {"within": within, "after": after}
    problems = [compiled.problems for compiled in first]
    print(json.dumps({"problems": problems, "same": first == again, "kept": kept, "later": later} | context))


if __name__ == "__main__":
    main()
