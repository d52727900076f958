"""Operations alone: every linear layer of a block and attention, as planned for their size, against the peers."""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench import family_towers, peer_attention, towers
from fusedvit.bench.cases import STATS_WIDTH, Case, attention_case, linear_case, supported
from fusedvit.bench.timing import Contender, captured, in_turns
from fusedvit.bench.tower_bench import Step
from fusedvit.families import qwen3
from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.launch import compiling_only
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.plan import Task, attention_task, choose, plan_for, tasks
from fusedvit.model.spec import VisionSpec

ROWS = (256, 784, 1296, 4096, 16384)
ROWS_ON_CPU = (64,)
OVER_MERGED = ("merger", "downsample")  # operations whose rows are merged tokens
STATS_FROM = {"qkv": "fc2", "fc1": "proj", "merger_fc1": "fc2"}  # who writes the statistics that they read
SEQUENCES = {  # count x length; 784 and 1024 are single pictures, 256 is a video's frame
    "64 x 256": (256,) * 64,
    "16 x 1024": (1024,) * 16,
    "1 x 1024": (1024,),
    "1 x 784": (784,),
    "32 x 784": (784,) * 32,
    "1 x 4096": (4096,),
    "1 x 16384": (16384,),
}
SEQUENCES_ON_CPU = {"2 x 40": (40, 40)}


@dataclass(frozen=True)
class KernelRow:
    """One operation at one size.

    Attributes:
        op: as in `plan.EncoderPlan`.
        us: microseconds of ours, None where its answer broke the tolerance rule.
        peers_us: microseconds of each peer.
        floor_us: of the roofline.
        reason: why there is no number.
    """

    tower: str
    op: str
    shape: str
    backend: str
    us: float | None
    peers_us: dict[str, float]
    floor_us: float
    reason: str


@dataclass(frozen=True)
class Job:
    """One row to be measured; its data are made when it is."""

    tower: str
    task: Task
    shape: str
    make: Callable[[], Case]


def measure(
    names: tuple[str, ...], device: torch.device, fa3: Path | None, step: Step, sizes: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """A row for every operation of every tower at every size; `sizes`: only at so many rows."""
    if fa3 is not None:
        peer_attention.load_fa3(fa3)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    jobs = [job for name in names for job in _jobs(name, dtype, device, fa3 is not None, sizes)]
    if device.type == "cuda":
        step("compilation")
        compile_jobs(jobs, dtype, device)
    found = []
    for job in jobs:
        step(f"{job.tower}: {job.task.name}, {job.shape}")
        found.append(vars(_row(job, dtype, device)))
    return found


def _jobs(name: str, dtype: torch.dtype, device: torch.device, fa3: bool, sizes: tuple[int, ...]) -> Iterator[Job]:
    spec, on_gpu = spec_of(name), device.type == "cuda"
    for rows in sizes or (ROWS if on_gpu else ROWS_ON_CPU):
        yield from linear_jobs(name, rows, dtype, device)
    for label, lengths in (SEQUENCES if on_gpu else SEQUENCES_ON_CPU).items():
        if not sizes or sum(lengths) in sizes:
            task = attention_task(spec, sum(lengths), dtype, max(lengths))
            make = functools.partial(attention_case, spec.num_heads, spec.head_dim, lengths, dtype, device, fa3)
            yield Job(name, task, label, make)


def linear_jobs(name: str, rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Job]:
    """Every linear layer of the tower `name` at `rows` patch rows."""
    spec = spec_of(name)
    plan = plan_for(spec, rows, dtype, Target.of(device))
    for task in tasks(spec, rows, dtype):
        if task.key.op == backends.LINEAR and supported(task):
            own = rows // spec.merge_unit if task.name.startswith(OVER_MERGED) else rows
            width = getattr(plan, STATS_FROM[task.name]).block_n if task.name in STATS_FROM else STATS_WIDTH
            make = functools.partial(linear_case, task, spec, dtype, device, own, width)
            yield Job(name, task, f"{own} x {task.key.n} x {task.key.k}", make)


def compile_jobs(jobs: Sequence[Job], dtype: torch.dtype, device: torch.device) -> None:
    """What will be run, on all cores; of a case only its shapes matter here."""
    target = Target.of(device)
    with compiling_only():
        for job in jobs:
            job.make().run(choose(job.task, dtype, target, tuning_table.table_for(target)), 0)


def known() -> list[str]:
    """Names of geometries: the towers', then those of other families that the installed transformers has."""
    others = {n: g for n, g in family_towers.GEOMETRIES.items() if n not in towers.GEOMETRIES}
    return [*towers.GEOMETRIES, *(n for n, g in others.items() if family_towers.class_of(g) is not None)]


def spec_of(name: str) -> VisionSpec:
    """The spec of a geometry by its name, one of `known()`."""
    if name not in towers.GEOMETRIES:
        return family_towers.spec_of(family_towers.GEOMETRIES[name])
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    config = Qwen3VLVisionConfig(patch_size=16, num_position_embeddings=2304, **towers.GEOMETRIES[name])
    return qwen3.spec_from_config(config)


def _row(job: Job, dtype: torch.dtype, device: torch.device) -> KernelRow:
    target, case = Target.of(device), job.make()
    config = choose(job.task, dtype, target, tuning_table.table_for(target))
    backend = backends.backend_of(config).name
    try:
        verdict = case.check(config)
    except backends.BackendFailed:  # at its first launch; chosen again, it is another backend
        return _row(job, dtype, device)
    contenders = [Contender(n, captured(run, case.sets, device), "gpu") for n, run in case.peers.items()]
    if verdict.passed:
        contenders.append(Contender("ours", captured(functools.partial(case.run, config), case.sets, device), "gpu"))
    times = in_turns(contenders, device, seconds=0.05)
    us = {name: 1e3 * statistics.median(values) / case.sets for name, values in times.items()}
    ours, floor = us.pop("ours", None), 1e3 * case.cost.floor_ms
    return KernelRow(job.tower, job.task.name, job.shape, backend, ours, us, floor, verdict.reason)
