"""Run by test_aot.py without the interpreter: what whole towers launch, and what is listed of them, as JSON.

`unlike` lists the towers and GPUs where graphs of a tower, in its whole depth, launch other kernels than are listed,
which are those of a rehearsal. `kernels` are those of the default ladder on an H100 as `record` tells them
apart, `keys` as Triton does, by what it would compile.
"""

import itertools
import json
from functools import partial
from typing import Any
from unittest import mock

import triton
from triton.runtime.jit import JITFunction

from fusedvit.bench.ahead_of_time import DTYPES, TARGETS, TOWERS, launches_of
from fusedvit.bench.towers import class_of, family_and_spec
from fusedvit.kernels.codegen_checks import AbsentGPU, target_named
from fusedvit.kernels.launch import record
from fusedvit.runtime import captured_encoder
from fusedvit.runtime.tower_launches import launch_tower

BUDGETS = (64, 256, 896, 1408, 4096, 65536)  # with deepstack mergers overlapped with blocks; in line
encode = captured_encoder.encode


def whole(*arguments: Any) -> Any:
    """`encode`, but no rehearsal: without its last argument."""
    return encode(*arguments[:-1])


def unlike() -> list[tuple[str, int]]:
    def differ(tower: str, arch: int) -> bool:
        listed = launches_of(tower, "bf16", BUDGETS, TARGETS[arch])
        with mock.patch.object(captured_encoder, "encode", side_effect=whole) as run:
            launched = launches_of(tower, "bf16", BUDGETS, TARGETS[arch])
        assert run.called
        return set(launched) != set(listed)

    installed = [name for name, geometry in TOWERS.items() if class_of(geometry) is not None]
    return [each for each in itertools.product(installed, (90, 80)) if differ(*each)]


def ladder(tower: str) -> dict[str, int]:
    family, spec = family_and_spec(TOWERS[tower])
    found = record(partial(launch_tower, spec, family.names, DTYPES["bf16"], target_named("h100")))
    triton.runtime.driver.set_active(AbsentGPU(90))
    keys: set[tuple[str, str]] = set()

    def note(kernel: JITFunction, key: str, *compiled: Any, **options: Any) -> None:
        keys.add((kernel.__name__, key))

    with mock.patch.object(JITFunction, "_do_compile", note):
        for job in found.values():
            job.build()
    return {"kernels": len(found), "keys": len(keys)}


print(json.dumps({"unlike": unlike()} | ladder("Qwen3-VL-8B")))
