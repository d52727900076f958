"""Run by test_aot.py without the interpreter: what the default ladder of a tower launches on an H100, as JSON.

`kernels` are counted as `tower_launches` tells them apart, `keys` as Triton does, by what it would compile.
"""

import json
import sys
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from fusedvit.kernels.codegen_checks import AbsentGPU
from fusedvit.runtime.ahead_of_time import TOWERS
from fusedvit.runtime.gpus import target_named
from fusedvit.runtime.tower_launches import tower_launches

found = tower_launches(TOWERS[sys.argv[1]], torch.bfloat16, target_named("h100"))
triton.runtime.driver.set_active(AbsentGPU(90))
keys: set[tuple[str, str]] = set()


def note(kernel: JITFunction, key: str, *compiled: Any, **options: Any) -> None:
    keys.add((kernel.__name__, key))


with mock.patch.object(JITFunction, "_do_compile", note):
    for compiling in found.values():
        compiling()
print(json.dumps({"kernels": len(found), "keys": len(keys)}))
