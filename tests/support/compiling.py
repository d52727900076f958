"""Run by test_compile_service.py without the interpreter: has kernels compiled by the worker program, for a GPU that is
not there, and prints what became of them as JSON.

Words on the command line: `wait`: it prints a line first, and waits. `together`: it prints a line once it has looked
for kernels, and goes on when its standard input ends. `move`: once a kernel is compiled, Triton's cache is another
folder, and its ptxas the program in OTHER_PTXAS, as when PyTorch's Inductor first compiles for a GPU. `debug`: then,
settings change as in a notebook. `damage`: then, files of the cache are deleted.
"""

import json
import logging
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas_version

from fusedvit.kernels.codegen_checks import AbsentGPU
from fusedvit.kernels.launch import FromCache, KernelJob, is_cached, loading_from_cache
from fusedvit.kernels.store_outputs import store_outputs
from fusedvit.runtime import compile_worker
from fusedvit.runtime.compile_service import CompileService, Request

WIDTHS = (64, 72, 80, 96)
ARCH = 90


def launches() -> None:
    """One kernel for each width."""
    for width, out in pairwise((*WIDTHS, 128)):
        hidden, merged = torch.empty(4, width, device="meta"), torch.empty(1, out, device="meta")
        store_outputs(hidden, [merged], hidden, [merged])


def missing() -> dict[str, KernelJob]:
    """Kernels of these launches that are not in Triton's cache."""
    with loading_from_cache(FromCache(collect=True)) as mode:
        launches()
        for job in mode.jobs.values():
            mode.find(job)
    return mode.missing


def wait_for(service: CompileService, jobs: dict[str, KernelJob]) -> None:
    while service.waits_for(jobs):
        with service.changed:
            service.changed.wait(0.2)


def move() -> None:
    os.environ["TRITON_CACHE_DIR"] += "-of-a-compiler"
    os.environ |= dict.fromkeys(compile_worker.PTXAS, os.environ["OTHER_PTXAS"])


def debug() -> None:
    """What Triton reads when it is imported, and what keys depend on; there is no such ptxas as this one."""
    triton.knobs.runtime.debug = True
    os.environ |= {"TRITON_INTERPRET": "1", "PTXAS_OPTIONS": "-O1", "DISABLE_PTXAS_OPT": "1"}
    os.environ |= dict.fromkeys(compile_worker.PTXAS, os.path.dirname(__file__))


def damage() -> None:
    for cubin in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin"):
        cubin.unlink()


CHANGES = {"move": move, "debug": debug, "damage": damage}


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    triton.runtime.driver.set_active(AbsentGPU(ARCH))
    jobs, service = missing(), CompileService()
    if "together" in sys.argv:
        print("looked", flush=True)
        sys.stdin.read()
    with service.used():
        service.compile(Request(ARCH, get_ptxas_version(ARCH), jobs, 1.0, urgent=False))
        if "wait" in sys.argv:
            with service.changed:
                service.changed.wait_for(lambda: service.done, 60)
            print(service._process.pid if service._process else 0, service._scratch, flush=True)
            time.sleep(60)
        changes = [CHANGES[word] for word in sys.argv if word in CHANGES]
        if changes:
            with service.changed:
                service.changed.wait_for(lambda: service.done, 60)
            changes[0]()
        wait_for(service, jobs)
        while changes and not service.broken and (jobs := missing()):
            service.compile(Request(ARCH, get_ptxas_version(ARCH), jobs, 1.0, urgent=False))
            wait_for(service, jobs)
    left = missing()
    found = {
        "sent": len(jobs),
        "done": len(service.done),
        "failed": list(service.failed.values()),
        "broken": service.broken,
        "cached": all(is_cached(digest, job.name) for digest, job in jobs.items()),
        "left": len(left),
        "starts": service._starts,
        "scratch": service._scratch,
    }
    begin = time.monotonic()
    service.stop()
    stopped = time.monotonic() - begin
    print(json.dumps(found | {"kept": os.path.exists(found["scratch"]), "stopped": stopped}))


if __name__ == "__main__":
    main()
