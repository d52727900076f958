"""`fusedvit bench`: whole towers against their peers, in one process, on the same weights and inputs.

Accuracy comes before speed: a contender whose output breaks the tolerance rule (fusedvit/tolerance.py) gets no time.
Contenders then run interleaved in bursts of a few calls, and ratios are taken burst by burst, of each burst's median.
"ours" is wall time from pixels and grid on the GPU to outputs that the caller owns; engine-like peers are replays
between two events. At the first call of a burst the CPU's caches hold the other contenders' code and data; for wall
clocks its time is a figure of its own ("first_ms").
"""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse
from fusedvit.bench import baselines, towers, workloads
from fusedvit.bench.timing import Contender, first_ms, interleaved_bursts, peak_mib, ratios, spread
from fusedvit.bench.towers import MOST_USED, outputs_of, verdict_of
from fusedvit.bench.workloads import WORKLOADS, Grid, tokens
from fusedvit.config import FuseConfig
from fusedvit.errors import named_line
from fusedvit.fused_encoder import FusedEncoder

OURS, ENGINE = "ours", "engine-like"
BELIEVED = 0.9  # of the roofline's floor: its rates are measured, so a time may be slightly below it
BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # merged tokens; the largest holds 32768 patches
Step = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """The towers, workloads and contenders to measure.

    Attributes:
        workloads: grids by name.
        compile_on: workloads that torch.compile runs, too; it compiles for a minute each.
        fa3: FA3's library, for the engine-like peer.
        seconds: seconds of timing for each workload.
        short: only the contenders that a comparison needs: Hugging Face eager, engine-like with the attentions that may
            be the fastest, ours with graphs; captures graphs for these workloads alone.
    """

    towers: tuple[str, ...] = MOST_USED
    workloads: Mapping[str, Grid] = field(default_factory=lambda: dict(WORKLOADS))
    compile_on: tuple[str, ...] = ()
    fa3: Path | None = None
    seconds: float = 2.0
    dtype: torch.dtype = torch.bfloat16
    short: bool = False


@dataclass(frozen=True)
class Setting:
    """One tower and its variants, on the same parameters."""

    tower: nn.Module
    wide: nn.Module
    eager: nn.Module | None
    ours: nn.Module
    handle: FusedEncoder
    compiled: Mapping[str, Callable[..., Any]]
    device: torch.device


def measure(
    options: Options,
    device: torch.device,
    step: Step = lambda text: None,
    keep: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The whole document without its passport: `{"towers": {name: {"workloads": {name: row}, …}}}`.

    Args:
        keep: called with the document so far after every workload, so that an interrupted run leaves its results.
    """
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # the reference is fp32
    found: dict[str, Any] = {}
    document = {"towers": found, "ceilings": {"tflops": workloads.PEAK_TFLOPS, "tbs": workloads.PEAK_TBS}}
    with torch.inference_mode():
        for name in options.towers:
            step(f"{name}: weights, compilation, capture")
            begun = time.perf_counter()
            setting = set_up(name, options, device)
            rows: dict[str, Any] = {}
            found[name] = {"workloads": rows, "set_up_s": time.perf_counter() - begun}
            keep(document)
            for workload, grid in options.workloads.items():
                step(f"{name}: {workload}")
                begun = time.perf_counter()
                try:
                    measured = row(setting, options, workload, towers.GEOMETRIES[name].rows(grid))
                    rows[workload] = measured | {"took_s": time.perf_counter() - begun}
                except RuntimeError as error:  # the other workloads' figures are worth having
                    found[name].setdefault("failed", {})[workload] = named_line(error)
                found[name] |= {"memory": _held(setting), "report": setting.handle.report()}
                keep(document)
            setting.handle.release()
    return document


def set_up(name: str, options: Options, device: torch.device) -> Setting:
    """Builds the tower, compiled and captured, and its variants for the peers."""
    if options.fa3 is not None:
        baselines.load_fa3(options.fa3)
    geometry = towers.GEOMETRIES[name]
    with torch.inference_mode(False):
        tower, wide = towers.build(geometry, options.dtype, device)
        ours = towers.shared_copy(tower)
        eager = None if options.short else towers.shared_copy(tower)
        compiled = baselines.compiled(tower) if options.compile_on else {}
        if eager is not None:
            fuse(eager, FuseConfig(graphs=False, compile="now"))
        handle = fuse(ours, FuseConfig(token_budgets=BUDGETS, max_items=64, max_frames=256, compile="now"))
        handle.warmup(calls=[geometry.rows(g) for g in options.workloads.values()] if options.short else None)
        return Setting(tower, wide, eager, ours, handle, compiled, device)


def row(s: Setting, options: Options, workload: str, grid: Grid) -> dict[str, Any]:
    """One workload: parity, times, ratios, roofline, memory."""
    pixels = towers.pixels_for(s.tower, grid, tokens(grid))
    grid_thw = torch.tensor(grid, device=s.device)
    calls, failed = contenders(s, options, workload, grid, pixels, grid_thw)
    outputs = {c.name: _outputs(c) for c in calls if c.name != "hf"}
    assert s.handle.stats()["fused"], s.handle.report()
    pt = outputs_of(s.tower(pixels, grid_thw=grid_thw))
    ref = outputs_of(s.wide(pixels.to(towers.wider(options.dtype)), grid_thw=grid_thw))
    gates = {name: verdict_of(output, ref, pt) for name, output in outputs.items()}
    del pt, ref
    passed = [c for c in calls if gates.get(c.name, {"passed": True})["passed"]]
    bursts = interleaved_bursts(passed, s.device, options.seconds)
    times = {name: burst.ms for name, burst in bursts.items()}
    floor = workloads.tower_floor_ms(s.handle.spec, grid)
    for contender in passed:
        wrong = _afterwards(contender, times[contender.name], floor, outputs.get(contender.name))
        if wrong:
            gates[contender.name] = gates.get(contender.name, {}) | {"passed": False, "reason": wrong}
            del times[contender.name]
    found: dict[str, Any] = {
        "grid": grid,
        "tokens": tokens(grid),
        "floor_ms": floor,
        "parity": gates,
        "ms": {name: asdict(spread(values)) for name, values in times.items()},
        "first_ms": first_ms([c for c in passed if c.name in times], bursts),
        "calls_in_a_burst": min((burst.calls for burst in bursts.values()), default=0),
        "clock": {c.name: c.clock for c in calls},
        "failed": failed,
        "ran_eagerly": dict(s.handle.stats()["eager_runs"]),
    }
    by_engine = {c.name: found["ms"][c.name]["median"] for c in calls if c.clock == "gpu" and c.name in times}
    found["engine_like"] = min(by_engine, key=by_engine.__getitem__, default=None)
    if OURS in times:
        found["speedup"] = {n: asdict(ratios(v, times[OURS])) for n, v in times.items() if n != OURS}
        found["floor_percent"] = 100 * floor / found["ms"][OURS]["median"]
    if s.device.type == "cuda":
        found["peak_mib"] = {c.name: peak_mib(c.run, s.device) for c in calls if c.name in ("hf", OURS)}
    return found


def contenders(
    s: Setting, options: Options, workload: str, grid: Grid, pixels: torch.Tensor, grid_thw: torch.Tensor
) -> tuple[list[Contender], dict[str, str]]:
    """All contenders of this workload, the engine-like ones on the GPU's clock, and why one of these cannot run."""
    modules: dict[str, Callable[..., Any]] = {"hf": s.tower}
    if workload in options.compile_on:
        modules |= s.compiled
    modules |= ({} if s.eager is None else {"ours eager": s.eager}) | {OURS: s.ours}
    calls = [Contender(n, functools.partial(module, pixels, grid_thw=grid_thw)) for n, module in modules.items()]
    failed: dict[str, str] = {}
    if not baselines.defined_for(s.tower):
        failed[ENGINE] = baselines.UNDEFINED
        return calls, failed
    layout = baselines.lay_out(s.tower, grid, s.device)
    for name, attend in baselines.available(layout.frames, options.fa3 is not None, options.short).items():
        name = f"{ENGINE} {name}"
        try:
            calls.append(Contender(name, baselines.prepare(s.tower, pixels, layout, attend), "gpu"))
        except RuntimeError as error:  # this attention refuses the layout; the others still run
            failed[name] = named_line(error)
    return calls, failed


def _outputs(contender: Contender) -> list[torch.Tensor]:
    """A copy of the outputs of one run."""
    outputs = contender.run()
    return [t.clone() for t in (outputs if contender.clock == "gpu" else outputs_of(outputs))]


def _afterwards(contender: Contender, times: list[float], floor: float, output: list[torch.Tensor] | None) -> str:
    """Why the times cannot be believed, or "": they beat the floor, or the output has changed since the check."""
    if spread(times).median < BELIEVED * floor:
        return f"{spread(times).median:.3g} ms is under the floor of {floor:.3g} ms: it does less than the work"
    if (contender.name == OURS or contender.clock == "gpu") and output is not None:
        again = _outputs(contender)
        if not all(torch.equal(a, b) for a, b in zip(again, output, strict=True)):
            return "another output after the timing than before"
    return ""


def _held(s: Setting) -> dict[str, float]:
    """MiB that the tower holds besides its parameters: prepared weights; graphs and their buffers."""
    stats = s.handle.stats()
    return {"weights_mib": stats["weights_mib"], "graphs_mib": stats.get("graphs", {}).get("held_mib", 0.0)}
