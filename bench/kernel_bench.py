"""Operations alone: every linear layer of a block and attention, as planned for their size, against the peers."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench import family_towers, peer_attention, towers
from fusedvit.bench.cases import Case, attention_case, linear_case, supported
from fusedvit.bench.timing import Contender, captured, in_turns
from fusedvit.bench.tower_bench import Step
from fusedvit.families import qwen3
from fusedvit.kernels import forms, tables
from fusedvit.kernels.configs import Target
from fusedvit.plan import Task, choose, tasks
from fusedvit.spec import VisionSpec

ROWS = (256, 784, 1296, 4096, 16384)
ROWS_ON_CPU = (64,)
OVER_MERGED = ("merger", "downsample")  # operations whose rows are merged tokens
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
    form: str
    us: float | None
    peers_us: dict[str, float]
    floor_us: float
    reason: str


def measure(
    names: tuple[str, ...], device: torch.device, fa3: Path | None, step: Step, sizes: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """A row for every operation of every tower at every size; `sizes`: only at so many rows."""
    if fa3 is not None:
        peer_attention.load_fa3(fa3)
    every: tuple[int, ...] = ROWS if device.type == "cuda" else ROWS_ON_CPU
    sequences = SEQUENCES if device.type == "cuda" else SEQUENCES_ON_CPU
    if sizes:
        every, sequences = sizes, {label: n for label, n in sequences.items() if sum(n) in sizes}
    found = []
    for name in names:
        spec = spec_of(name)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        for rows in every:
            for task in tasks(spec, rows, dtype):
                if task.key.op == forms.LINEAR and supported(task):
                    step(f"{name}: {task.name} of {rows} rows")
                    own = rows // spec.merge_unit if task.name.startswith(OVER_MERGED) else rows
                    case = linear_case(task, spec, dtype, device, own)
                    found.append(_row(name, task, f"{own} x {task.key.n} x {task.key.k}", case, dtype, device))
        for label, lengths in sequences.items():
            step(f"{name}: attention {label}")
            task = next(t for t in tasks(spec, sum(lengths), dtype) if t.key.op == forms.ATTENTION)
            case = attention_case(spec.num_heads, spec.head_dim, lengths, dtype, device, fa3 is not None)
            found.append(_row(name, task, label, case, dtype, device))
    return [vars(row) for row in found]


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


def _row(tower: str, task: Task, shape: str, case: Case, dtype: torch.dtype, device: torch.device) -> KernelRow:
    target = Target.of(device)
    config = choose(task, dtype, target, tables.table_for(target))
    form = forms.form_of(config).name
    try:
        verdict = case.check(config)
    except forms.FormFailed:  # at its first launch; chosen again, it is another form
        return _row(tower, task, shape, case, dtype, device)
    contenders = [Contender(n, captured(run, case.sets, device), "gpu") for n, run in case.peers.items()]
    if verdict.passed:
        contenders.append(Contender("ours", captured(lambda i: case.run(config, i), case.sets, device), "gpu"))
    times = in_turns(contenders, device, seconds=0.05)
    us = {name: 1e3 * statistics.median(values) / case.sets for name, values in times.items()}
    ours = us.pop("ours", None)
    return KernelRow(tower, task.name, shape, form, ours, us, 1e3 * case.cost.floor_ms, verdict.reason)
