"""One operation alone: a case with random data of the right shapes, its check, its peers, its cost and its times.

Weights and biases come in several sets, together larger than L2, and launches rotate through them: in a tower every
layer finds its weights in memory, not in L2.
"""

import functools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from fusedvit.bench import baselines
from fusedvit.bench.tables import CUBLAS
from fusedvit.bench.timing import Contender, captured, interleaved
from fusedvit.bench.towers import GEOMETRIES, spec_of
from fusedvit.bench.workloads import MERGED, Cost, attention_cost, linear_cost
from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels import epilogue as epilogues
from fusedvit.kernels.attention import Segments, query_scale
from fusedvit.kernels.epilogue import Epilogue, HeadNorm, NormFold, Rope, RowStats, Scratch, Taps
from fusedvit.kernels.hopper.attention_configs import SHORT_FRAME
from fusedvit.kernels.hopper.gemm_configs import KINDS
from fusedvit.kernels.launch import FromCache, hash_sources, loading_from_cache
from fusedvit.kernels.positions import packed_width
from fusedvit.kernels.reference import attention as attention_ref
from fusedvit.kernels.reference import linear as linear_ref
from fusedvit.kernels.reference.positions import packed_cos_sin
from fusedvit.kernels.tile_configs import MAX_COUNTERS, MAX_SUMS, Target
from fusedvit.model.ops import ops_for
from fusedvit.model.plan import Task, choose, plan_for, tasks
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import in_lines, row_pitch
from fusedvit.tolerance import Comparison, compare

ROTATED_BYTES = 160 * 2**20  # of weights: an H200 has 60 MB of L2
MANY_ROWS, FEW_SETS = 8192, 3  # from this many rows on, activations alone push weights out of L2
GRAPH_MS, MOST_CALLS = (
    0.3,
    10,
)  # per graph of attention: starting a graph takes 10 us, which would distort short launches
SPARE_ROWS = 256  # after a tensor's last row in its buffer: at least a tile's
STATS_WIDTH = 128  # channels that a partial statistic of an input covers
ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}
ROWS = (256, 784, 1296, 4096, 16384)
ROWS_ON_CPU = (64,)
STATS_FROM = {"qkv": "fc2", "fc1": "proj", "deepstack_fc1": "fc2"}  # reader -> writer of its statistics
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
NO_KERNEL, TORCH_PRODUCT = "torch reference", "torch product + bias"  # names of what runs on a CPU


@dataclass(frozen=True)
class Case:
    """`run(config, i)` launches with the i-th set of weights; `check(config)` compares a run with the reference.

    Attributes:
        sets: the number of sets of weights; without weights, the number of launches that are timed together.
        fill: `fill(rows)` sets the row count of the next runs; None if it is fixed.
        peers: other implementations by name, called as `peer(i)`.
    """

    run: Callable[[Any, int], Any]
    check: Callable[[Any], Comparison]
    sets: int
    cost: Cost
    peers: Mapping[str, Callable[[int], Any]]
    fill: Callable[[int], Any] | None = None


def wrong_twice(config: Any, cases: Sequence[Case], again: Callable[[], Sequence[Case]]) -> str:
    """Why `config` breaks the tolerance rule in one of `cases`, and again in one of `again`, on other data; or "".

    Attention that subtracts a fixed offset instead of a running maximum exceeds the rule's maximum by chance, for one
    set of random data in hundreds.
    """
    reason = ""
    for drawn in (lambda: cases, again):
        reason = next((said for case in drawn() if (said := case.check(config).reason)), "")
        if not reason:
            break
    return reason


def supported(task: Task) -> bool:
    """Whether there is a case for `task`: attention, or an epilogue of parts that are known here."""
    return task.key.op == backends.ATTENTION or set(task.key.kind.split("+")) <= KINDS


def linear_case(
    task: Task,
    spec: VisionSpec,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    stats: int = STATS_WIDTH,
    sets: int | None = None,
) -> Case:
    """A linear layer with `rows` rows of content in buffers with a capacity of as many.

    Args:
        stats: channels that one partial statistic of the input covers.
        sets: number of sets of weights; None for enough to push each other out of L2.
    """
    n, k, parts = task.key.n, task.key.k, set(task.key.kind.split("+"))
    sets = sets or rotated_sets(n * k * dtype.itemsize, rows, device)
    cols = n // 2 if parts & set(epilogues.GATED) else n
    x = _in_buffer(rows, k, dtype, device).copy_(_random(rows, k, dtype=dtype, device=device))
    out = _in_buffer(rows, cols, dtype, device)
    weights = [in_lines(_random(n, k, dtype=dtype, device=device, scale=k**-0.5)) for _ in range(sets)]
    count = torch.tensor([rows], dtype=torch.int32, device=device)
    common = _inputs(parts, spec, x, weights, n, stats)
    epilogue = functools.partial(_epilogue, parts, spec, common, rows, n)

    def run(config: Any, i: int) -> torch.Tensor:
        return ops_for(device).linear(x, weights[i], count, out, epilogue(config, i), config)

    def check(config: Any) -> Comparison:
        out.fill_(float("nan"))
        run(config, 0)
        e = epilogue(config, 0)
        wide = torch.empty(rows, cols, dtype=torch.float32, device=device)
        ref = linear_ref.linear(x, weights[0], count, wide, e, config)
        return compare(out, ref, _as_torch_rounds(x, weights[0], count, e, config, ref.to(dtype)))

    product = CUBLAS if device.type == "cuda" else TORCH_PRODUCT
    peers = {product: functools.partial(_product, x, weights, [bias.to(dtype) for bias in common["bias"]])}
    cost = linear_cost(rows, n, k, extra_values=rows * n if parts & {"residual", "taps"} else 0)
    return Case(run, check, sets, cost, peers, count.fill_)


def _epilogue(
    parts: set[str], spec: VisionSpec, common: dict[str, Any], rows: int, n: int, config: Any, i: int
) -> Epilogue:
    """The epilogue with the i-th set of weights; `common` is the result of `_inputs`."""
    return Epilogue(
        common["bias"][i],
        NormFold(common["stats"], common["colsum"][i], spec.norm_eps) if parts & {"norm", "rms"} else None,
        activation=next((a for a in parts if a in epilogues.ACTIVATIONS), "none"),
        limit=spec.glu_limit if "swiglu" in parts else None,
        stats=RowStats.over(common["moments"], rows, n, config.block_n) if "stats" in parts else None,
        **{name: common[name] for name in ("taps", "rope", "residual", "scratch", "heads")},
    )


def _product(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], i: int) -> torch.Tensor:
    return F.linear(x, weights[i], biases[i])


def rotated_sets(weight_bytes: int, rows: int, device: torch.device) -> int:
    """How many sets of weights push each other out of L2."""
    if device.type != "cuda":
        return 2
    return -(-ROTATED_BYTES // weight_bytes) if rows < MANY_ROWS else FEW_SETS


def _inputs(
    parts: set[str], spec: VisionSpec, x: torch.Tensor, weights: list[torch.Tensor], n: int, stats_width: int
) -> dict[str, Any]:
    """The inputs of the epilogue, and memory for what it writes besides the output."""
    rows, device, dtype = x.shape[0], x.device, x.dtype
    found: dict[str, Any] = dict.fromkeys(("stats", "colsum", "taps", "rope", "residual", "heads"))
    folded = bool(parts & {"norm", "rms"})
    kept = torch.float32 if folded else dtype
    found["bias"] = [_random(n, dtype=kept, device=device, scale=0.05) for _ in weights]
    found["moments"] = torch.empty(rows * -(-n // 32) * 2, dtype=torch.float32, device=device)
    found["scratch"] = Scratch.zeros(MAX_SUMS, MAX_COUNTERS, device)
    if folded:
        producing = x.reshape(-1, spec.hidden_size)  # a row of a merger is several of these
        values = producing.shape[0] * -(-spec.hidden_size // stats_width) * 2
        storage = torch.empty(values, dtype=torch.float32, device=device)
        stats = RowStats.over(storage, producing.shape[0], spec.hidden_size, stats_width)
        linear_ref.store_moments(producing, stats)
        found["stats"] = stats.merged(producing.shape[0] // rows)
        found["colsum"] = [w.float().sum(1) if "norm" in parts else None for w in weights]
    if "heads" in parts:
        weight = 1 + _random(2 + spec.v_norm, spec.head_dim, dtype=torch.float32, device=device, scale=0.2)
        bounds = torch.tensor([[-2.5, 3.0]] * len(weight), device=device) if spec.clipped else None
        found["heads"] = HeadNorm(weight, spec.norm_eps, bounds)
    if "rope" in parts:
        angle = 100 * torch.rand(rows, spec.head_dim // 2, device=device)
        table = torch.stack([angle.cos(), angle.sin()], 1)
        packed = _in_buffer(rows, packed_width(spec.head_dim), torch.int32, device)
        packed_cos_sin(table, torch.tensor([rows]), packed)
        found["rope"] = Rope(table, 2 * n // 3, spec.head_dim, packed)
    if "taps" in parts:
        index = torch.randint(spec.position_rows, (rows, spec.position_taps), device=device, dtype=torch.int32)
        table = _random(spec.position_rows, n, dtype=dtype, device=device)
        found["taps"] = Taps(table, index, torch.rand(rows, spec.position_taps, device=device))
    if "residual" in parts:
        drawn = _random(rows, n, dtype=dtype, device=device)
        found["residual"] = _in_buffer(rows, n, dtype, device).copy_(drawn)
    return found


def _as_torch_rounds(
    x: torch.Tensor, w: torch.Tensor, count: torch.Tensor, e: Epilogue, config: Any, rounded: torch.Tensor
) -> torch.Tensor:
    """PyTorch's own output for the tolerance rule: PyTorch rounds the product before an activation or a residual. If
    neither follows, it is `rounded`."""
    if e.residual is None and e.activation not in ACTIVATIONS:
        return rounded
    product = linear_ref.linear(x, w, count, torch.empty_like(rounded), Epilogue(bias=e.bias, norm=e.norm), config)
    if e.activation in ACTIVATIONS:
        product = F.gelu(product, approximate=ACTIVATIONS[e.activation])
    return product if e.residual is None else product + e.residual


def attention_case(
    heads: int,
    head_dim: int,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    fa3: bool,
) -> Case:
    """Sequences of `lengths`, packed. There is one set of data, since a tower has just written q, k and v."""
    rows, c = sum(lengths), heads * head_dim
    theirs = _random(rows, 3 * c, dtype=dtype, device=device)  # q | k | v
    out = torch.empty(rows, c, dtype=dtype, device=device)
    qkv = torch.cat([theirs[:, :c] * query_scale(head_dim), theirs[:, c:]], 1)  # peers scale the scores instead
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    segments_for = functools.cache(functools.partial(_segments, cu, lengths))

    def run(config: Any, i: int) -> torch.Tensor:
        ops_for(device).attention(qkv, segments_for(config.block_m), out, heads, head_dim, config)
        return out

    q, k, v = theirs.view(rows, 3, heads, head_dim).unbind(1)
    frames = baselines.Frames(cu, lengths)

    @functools.cache
    def references() -> tuple[torch.Tensor, torch.Tensor]:
        """The output in fp32, and PyTorch's own."""
        unused: Any = None
        ref = attention_ref.attention(qkv.float(), segments_for(64), out.float(), heads, head_dim, unused)
        scaled = qkv.view(rows, 3, heads, head_dim).unbind(1)
        return ref, baselines.by_frame(frames, scale=math.log(2))(*scaled).reshape(rows, c)

    def check(config: Any) -> Comparison:
        out.fill_(float("nan"))
        run(config, 0)
        return compare(out, *references())

    attends = baselines.available(frames, fa3)
    peers = {name: (lambda i, attend=attend: attend(q, k, v)) for name, attend in attends.items()}
    cost = attention_cost(list(lengths), heads, head_dim)
    return Case(run, check, max(1, min(MOST_CALLS, round(GRAPH_MS / cost.floor_ms))), cost, peers)


def _segments(cu: torch.Tensor, lengths: tuple[int, ...], block_m: int) -> Segments:
    """Tiles of `block_m` queries of every sequence."""
    starts = zip(accumulate(lengths, initial=0), lengths, strict=False)
    tiles = [(begin, begin + n, row, 0) for begin, n in starts for row in range(begin, begin + n, block_m)]
    table = torch.tensor(tiles, dtype=torch.int32).to(cu.device)
    return Segments(cu, table, torch.tensor([len(tiles)], dtype=torch.int32).to(cu.device), block_m)


def _in_buffer(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[rows, cols]`, uninitialised, with the row pitch of the encoder's buffers and with memory after the last row:
    in an encoder, the buffer of any budget but the largest is a view of a larger one."""
    return torch.empty(rows + SPARE_ROWS, row_pitch(cols, dtype), dtype=dtype, device=device)[:rows, :cols]


def _random(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


@dataclass(frozen=True)
class OperationRow:
    """One operation at one size.

    Attributes:
        op: its name in `plan.EncoderPlan`.
        backend: the backend of the kernel that ran; on a CPU `NO_KERNEL`.
        us: microseconds of ours; None if its output breaks the tolerance rule.
        peers_us: microseconds of each peer.
        floor_us: the roofline of bench/workloads.py, an H200's; None on a CPU.
        reason: why `us` is None.
    """

    tower: str
    op: str
    shape: str
    backend: str
    us: float | None
    peers_us: dict[str, float]
    floor_us: float | None
    reason: str


@dataclass(frozen=True)
class Job:
    """One row to be measured; `make` allocates its data."""

    tower: str
    task: Task
    shape: str
    make: Callable[[], Case]


def measure(
    names: tuple[str, ...],
    device: torch.device,
    fa3: Path | None,
    step: Callable[[str], None],
    sizes: tuple[int, ...] = (),
) -> list[dict[str, Any]]:
    """A row for every operation of every tower at every size, as plain values.

    Args:
        fa3: FA3's library, for a peer of attention.
        step: called with the name of each measurement.
        sizes: patch rows; if empty, all of `ROWS`.
    """
    if fa3 is not None:
        baselines.load_fa3(fa3)
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
    spec, on_gpu = spec_of(GEOMETRIES[name]), device.type == "cuda"
    for rows in sizes or (ROWS if on_gpu else ROWS_ON_CPU):
        yield from linear_jobs(name, rows, dtype, device)
    for label, lengths in (SEQUENCES if on_gpu else SEQUENCES_ON_CPU).items():
        if not sizes or sum(lengths) in sizes:
            task = attention_task(spec, sum(lengths), dtype, max(lengths))
            make = functools.partial(attention_case, spec.num_heads, spec.head_dim, lengths, dtype, device, fa3)
            yield Job(name, task, label, make)


def attention_task(spec: VisionSpec, rows: int, dtype: torch.dtype, length: int) -> Task:
    """The attention task for frames of `length` tokens in a budget of `rows` patch tokens."""
    found = {task.name: task for task in tasks(spec, rows, dtype)}
    return found["short_attention" if length <= SHORT_FRAME and "short_attention" in found else "attention"]


def linear_jobs(name: str, rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Job]:
    """Every linear layer of the tower `name` at `rows` patch rows."""
    spec = spec_of(GEOMETRIES[name])
    plan = plan_for(spec, rows, dtype, Target.of(device))
    for task in tasks(spec, rows, dtype):
        if task.key.op == backends.LINEAR and supported(task):
            own = max(1, rows // spec.merge_unit) if task.name.startswith(MERGED) else rows
            width = getattr(plan, STATS_FROM[task.name]).block_n if task.name in STATS_FROM else STATS_WIDTH
            make = functools.partial(linear_case, task, spec, dtype, device, own, width)
            yield Job(name, task, f"{own} x {task.key.n} x {task.key.k}", make)


@contextmanager
def compiling_only() -> Iterator[None]:
    """A context in which launches are noted; leaving it compiles their kernels in parallel and waits for them.

    A failing compilation raises nothing here; it fails again at its first real launch.
    """
    with loading_from_cache(FromCache(collect=True)) as noted:
        yield
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for job in noted.jobs.values():
            hash_sources(job.kernel(), lambda: None, set())
            job.build()


def compile_jobs(jobs: Sequence[Job], dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernels that will run, on all cores; of a case only the shapes matter here."""
    target = Target.of(device)
    with compiling_only():
        for job in jobs:
            job.make().run(choose(job.task, dtype, target, tuning_table.table_for(target)), 0)


def _row(job: Job, dtype: torch.dtype, device: torch.device) -> OperationRow:
    target, case = Target.of(device), job.make()
    config = choose(job.task, dtype, target, tuning_table.table_for(target))
    try:
        wrong = wrong_twice(config, [case], lambda: [job.make()])
        us = _times_us(case, config, device, ours=not wrong)
    except backends.BackendFailed:  # noted at its first launch, so that `choose` now takes another backend
        return _row(job, dtype, device)
    ours, on_gpu = us.pop("ours", None), device.type == "cuda"
    backend = backends.backend_of(config).name if on_gpu else NO_KERNEL
    floor = 1e3 * case.cost.floor_ms if on_gpu else None
    return OperationRow(job.tower, job.task.name, job.shape, backend, ours, us, floor, wrong)


def _times_us(case: Case, config: Any, device: torch.device, ours: bool) -> dict[str, float]:
    """Microseconds of the peers and, with `ours`, of "ours", interleaved."""
    runs: dict[str, Callable[[int], Any]] = {**case.peers}
    if ours:
        runs["ours"] = functools.partial(case.run, config)
    contenders = [Contender(name, captured(run, case.sets, device), "gpu") for name, run in runs.items()]
    times = interleaved(contenders, device, seconds=0.05)
    return {name: 1e3 * statistics.median(values) / case.sets for name, values in times.items()}
