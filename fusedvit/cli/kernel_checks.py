"""Checks of the Triton kernels without a GPU: how many a call launches, whether they compute the same in Triton's
interpreter, and whether they compile for a GPU.

The last two run in parallel in processes of their own: Triton decides between interpreter and compiler when kernels are
imported. The processes are killed at a deadline, and they die with this one.

`python -m fusedvit.cli.kernel_checks interpret` or `compile PART PARTS` is such a process; it prints one JSON document
per line.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from fusedvit.bench.ahead_of_time import Matrix, compile_or_fail, jobs_of
from fusedvit.bench.towers import GEOMETRIES, build_one, family_and_spec
from fusedvit.children import interpreter, search_path
from fusedvit.cli.console import Step, plain
from fusedvit.families.base import Family
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.buffers import Capacity, allocate
from fusedvit.model.encoder import EncoderOutputs, encode
from fusedvit.model.items import Item
from fusedvit.model.ops import TRITON, Ops
from fusedvit.model.plan import plan_for
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime.compiled_kernels import end_with_parent
from fusedvit.tolerance import Comparison, compare

OK, FAILED, NOT_RUN = "ok", "failed", "not run"
COMPILERS = 2  # processes
PROGRAM = "fusedvit.cli.kernel_checks"
PATCHES = 1024
COMPILED = Matrix((90,), ("bf16",), ("Qwen3-VL-8B",), (PATCHES,), alike=True)
WHAT_COMPILED = f"Qwen3-VL-8B's kernels at {PATCHES} patches compiled for sm_90"
WHAT_INTERPRETED = "one block in Triton's interpreter"
POLL_SECONDS = 0.2
ONE_BLOCK = GEOMETRIES["tiny"].but(depth=1)
ITEMS = (Item(1, 4, 6), Item(2, 2, 4))  # an image and a video of two frames


@dataclass(frozen=True)
class KernelCheck:
    """One check in words, with its values. outcome: OK, FAILED, or NOT_RUN (there was no time)."""

    what: str
    outcome: str
    detail: str
    values: Any

    @property
    def passed(self) -> bool:
        """Whether nothing was found wrong; a check that was not run passes."""
        return self.outcome != FAILED


# ── the checks ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def started() -> Iterator[Callable[[Step, float], list[KernelCheck]]]:
    """Starts both checks; gives a function that returns their results after the given seconds at most. At the end of
    the context no process is left."""
    with contextlib.ExitStack() as stack:
        interpreter = stack.enter_context(_worker("interpret"))
        compilers = [stack.enter_context(_worker("compile", str(i), str(COMPILERS))) for i in range(COMPILERS)]
        yield functools.partial(_finish, interpreter, compilers)


def _finish(interpreter: "_Worker", compilers: "Sequence[_Worker]", step: Step, seconds: float) -> list[KernelCheck]:
    deadline = time.monotonic() + seconds
    while any(worker.running for worker in (interpreter, *compilers)) and time.monotonic() < deadline:
        compiled = sum(len(worker.documents()) for worker in compilers)
        also = f"; {WHAT_INTERPRETED}" if interpreter.running else ""
        step(f"{compiled} kernels compiled for sm_90{also}")
        time.sleep(POLL_SECONDS)
    return [interpreted_check(interpreter), compiled_check(compilers)]


def interpreted_check(worker: "_Worker") -> KernelCheck:
    """The kernels of a one-block tower under Triton's interpreter, against the original by the tolerance rule."""
    documents = worker.documents()
    if not documents:
        outcome = NOT_RUN if worker.running else FAILED
        return KernelCheck(WHAT_INTERPRETED, outcome, worker.complaint(), {})
    outputs = documents[0]
    failed = [f"{name}: {verdict['reason']}" for name, verdict in outputs.items() if not verdict["passed"]]
    worst = max(float(verdict["ratio_max"]) for verdict in outputs.values())
    detail = "; ".join(failed) or f"{len(outputs)} outputs, largest error {worst:.2f} times the original's"
    return KernelCheck(WHAT_INTERPRETED, FAILED if failed else OK, detail, outputs)


def compiled_check(workers: "Sequence[_Worker]") -> KernelCheck:
    """The result of the compiling processes; kernels of a process still at work count as not run."""
    results = [document for worker in workers for document in worker.documents()]
    problems = sorted({problem for result in results for problem in result["problems"]})
    dead = [worker.complaint() for worker in workers if not worker.running and worker.process.returncode]
    unfinished = any(worker.running for worker in workers)
    detail = f"{len(results)} kernels" + (", no time for the rest" if unfinished else "")
    if problems or dead:
        return KernelCheck(WHAT_COMPILED, FAILED, "; ".join([*problems, *dead])[:300], results)
    return KernelCheck(WHAT_COMPILED, OK if results else NOT_RUN, detail, results)


class _Worker:
    """A process of this module, in a group of its own, and the documents that it has printed."""

    def __init__(self, arguments: Sequence[str], output: Any, errors: Any) -> None:
        self._output, self._errors = output, errors
        changed = {"TRITON_INTERPRET": str(int(arguments[0] == "interpret")), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [interpreter(), "-m", PROGRAM, *arguments, "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=os.environ | search_path() | changed,
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def documents(self) -> list[Any]:
        """The documents printed so far; an incomplete line is left for later."""
        lines = _text(self._output).splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def complaint(self) -> str:
        """Why there is no document."""
        if self.running:
            return "no time"
        last = (_text(self._errors).strip() or "no message").splitlines()[-1]
        return f"exit code {self.process.returncode}: {last[:200]}"

    def kill(self) -> None:
        """Kills the process and its child, ptxas."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def _worker(*arguments: str) -> Iterator[_Worker]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        worker = _Worker(arguments, output, errors)
        try:
            yield worker
        finally:
            worker.kill()


def _text(file: Any) -> str:
    """The content of a file that another process writes to. The file's position, which both share, stays."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


# ── what runs in the processes ────────────────────────────────────────────────────────────────────────────────────────


def die_with(parent: int) -> None:
    """Has Linux kill this process when `parent`, which started it, ends in any way."""
    end_with_parent()
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")


def compile_part(part: int, parts: int) -> Iterator[dict[str, Any]]:
    """Compiles every `parts`-th kernel from `part` on, and yields a record of each."""
    for job, arch in jobs_of(COMPILED)[part::parts]:
        yield plain(compile_or_fail(job, arch))


def interpreted_block() -> dict[str, Comparison]:
    """Compares every output of the interpreted kernels in fp32 with Hugging Face's module in fp32 and in fp64."""
    tower, (family, spec) = build_one(ONE_BLOCK, torch.float32, torch.device("cpu")), family_and_spec(ONE_BLOCK)
    tokens = sum(item.tokens for item in ITEMS)
    pixels = torch.rand(tokens, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    outputs = encode_once(spec, family, dict(tower.named_parameters()), pixels, ITEMS, TRITON)
    ours = _named(outputs.pooled, outputs.hidden, outputs.deepstack)
    pt, ref = _original(tower, pixels), _original(tower.double(), pixels.double())
    return {name: compare(ours[name], ref[name], pt[name]) for name in ours}


def _original(tower: Any, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    grid = torch.tensor([[item.t, item.h, item.w] for item in ITEMS])
    with torch.inference_mode():
        record = tower(pixels, grid_thw=grid)
    return _named(record.pooler_output, record.last_hidden_state, record.deepstack_features)


def _named(pooled: torch.Tensor, hidden: torch.Tensor, deepstack: Any) -> dict[str, torch.Tensor]:
    features = {f"deepstack_features[{i}]": feature for i, feature in enumerate(deepstack)}
    return {"pooler_output": pooled, "last_hidden_state": hidden, **features}


# ── the encoder on a given table of operations ────────────────────────────────────────────────────────────────────────


def encode_once(
    spec: VisionSpec,
    family: Family,
    parameters: Mapping[str, torch.Tensor],
    pixels: torch.Tensor,
    items: Sequence[Item],
    ops: Ops,
) -> EncoderOutputs:
    """Prepares the weights and runs `ops` on pixels `[P, C*tp*p*p]`, in buffers of exactly their size."""
    weights = prepare(spec, family.names, family.source(parameters))
    plan = plan_for(spec, len(pixels), pixels.dtype, Target())
    buffers = allocate(spec, Capacity.of(items, plan.layout(spec)), pixels.dtype, pixels.device, pixels)
    buffers.grid.copy_(torch.tensor([[item.t, item.h, item.w] for item in items]))
    with torch.inference_mode():
        return encode(spec, weights, buffers, ops, plan)


def kernel_calls(handle: Any) -> dict[str, int]:
    """Launches of one call of a fused tower on a GPU, by operation. Nothing is computed: all tensors are meta."""
    calls: Counter[str] = Counter(fingerprint=int(handle.config.watch_data))

    def noted(name: str) -> Callable[..., Any]:
        def operation(*args: Any) -> None:
            calls[name] += 1

        return operation

    table = Ops("count", **{f.name: noted(f.name) for f in fields(Ops) if f.name != "name"})
    spec, merge = handle.spec, handle.spec.merge_size
    parameters = {name: parameter.to("meta") for name, parameter in handle.tower.named_parameters()}
    pixels = torch.empty(merge * merge, spec.patch_width, device="meta")
    encode_once(spec, handle.family, parameters, pixels, [Item(1, merge, merge)], table)
    return dict(calls)


def main(arguments: Sequence[str]) -> None:
    *words, _, parent = arguments
    die_with(int(parent))
    if words[0] == "interpret":
        print(json.dumps(plain(interpreted_block())))
        return
    for result in compile_part(int(words[1]), int(words[2])):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
