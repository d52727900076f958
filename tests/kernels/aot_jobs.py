"""Run by test_aot.py without the interpreter: whether jobs have the keys of the launches that they are of, as JSON."""

import gc
import itertools
import json
import pickle
import sys
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from fusedvit.bench.towers import GEOMETRIES, family_and_spec
from fusedvit.kernels import launch
from fusedvit.kernels.codegen_checks import AbsentGPU, target_named
from fusedvit.kernels.launch import FromCache, KernelJob, hash_sources, loading_from_cache
from fusedvit.runtime.captured_encoder import limits_for
from fusedvit.runtime.kernel_loader import Run
from fusedvit.runtime.meta_runs import MetaRuns
from fusedvit.runtime.tower_launches import MEMORY, meta_weights

BUDGETS = (64, 256, 1024)


class Keys(FromCache):
    """Notes keys; nothing is in the cache."""

    def __init__(self) -> None:
        super().__init__(collect=True)
        self.keys: list[str] = []

    def submit(self, key: str, *_: Any) -> Any:
        self.keys.append(key)


def keys_of(kernel: Any, ask: Any) -> list[str]:
    """Keys that Triton asks for within `ask`, where it has no kernel yet."""
    kernel.device_caches.clear()
    with loading_from_cache(Keys()) as mode:
        ask()
    return mode.keys


def main() -> None:
    family, spec = family_and_spec(GEOMETRIES[sys.argv[1]])
    dtype, target = torch.bfloat16, target_named(sys.argv[2])
    triton.runtime.driver.set_active(AbsentGPU(target.capability))
    launches: list[tuple[Any, ...]] = []
    real = KernelJob.of

    def noted(*given: Any) -> KernelJob:
        job = real(*given)
        launches.append((*given, job))
        return job

    runs = MetaRuns(spec, dtype, limits_for(spec, dtype, MEMORY), lambda: target)
    weights = meta_weights(spec, family.names, dtype, True)
    with mock.patch.object(launch.KernelJob, "of", noted), loading_from_cache(Keys()):
        for run in (
            *(Run((0, 1, 2), graph_budget=budget) for budget in BUDGETS),
            Run((0, 1, 2), eager_patch_tokens=4096),
        ):
            runs.launch(run, weights)
    found, other = {}, []
    for kernel, given, constants, options, job in launches:
        if repr(job) in found:
            continue
        sent = pickle.loads(pickle.dumps(job))
        ask = keys_of(kernel, lambda: kernel.warmup(*given, grid=(1,), **constants, **options))  # noqa: B023
        found[repr(job)] = keys_of(kernel, sent.build)
        if len(ask) != 1 or ask != found[repr(job)]:
            other.append(job.name)
    keys = len({key for keys in found.values() for key in keys})
    kernels = list({kernel.__name__: kernel for kernel, *_ in launches}.values())
    print(json.dumps({"jobs": len(found), "keys": keys, "other": other, "of_order": of_order(kernels)}))


def of_order(kernels: list[Any]) -> list[str]:
    """Kernels whose sources have another hash if those of another kernel were hashed before: another process would look
    for them under another key."""
    functions = [f for f in gc.get_objects() if isinstance(f, JITFunction)]

    def hash_after(first: Any, kernel: Any) -> str:
        for function in functions:
            function.hash, function.used_global_vals = None, {}
        for one in (first, kernel):
            hash_sources(one, lambda: None, set())
        found: str = kernel.hash
        return found

    return [a.__name__ for a, b in itertools.permutations(kernels, 2) if hash_after(b, a) != hash_after(a, a)]


if __name__ == "__main__":
    main()
