"""`python -m fusedvit.bench.first_call`: what users wait for before calls run fused. Needs a GPU; takes four minutes.

Every scenario runs in a process of its own, with an empty Triton cache unless stated: calls of ten image sizes in a
loop, `warmup()` cold and warm, and one call a second on two cores. Calls are timed with the GPU at rest before and
after. Hugging Face's own first call and medians come from separate processes on the same cores. Before all of these,
one process reads the libraries from the disk, which may take seconds, so that the next one does not.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse
from fusedvit.bench import towers
from fusedvit.bench.records import arguments, need_gpus, passport, run_program, write
from fusedvit.bench.workloads import image
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.runtime.compile_service import service_of
from fusedvit.runtime.compiled_kernels import VARIABLE

GEOMETRY = "Qwen3-VL-8B"
SIDES = (448, 224, 336, 512, 576, 672, 768, 896, 1024, 1344)  # pixels; the first call is one of 448
LOOP_SECONDS, WARM_SECONDS, SLOW_SECONDS = 60.0, 12.0, 60.0
PAUSE = 1.0  # seconds between calls on two cores, ours and Hugging Face's
SCENARIO_SECONDS = 150.0  # the most that a whole scenario may take
MEDIAN_OF = 15
KEPT = 16  # slowest calls of a scenario that the document lists
CLOSE = 0.03  # bound on a fused output's error relative to the original's, by norms
BARS = {  # name in the result: (at most, what it is)
    "slowest_of_hf": (3.0, "slowest call but the first / Hugging Face's median of its size"),
    "new_size_of_hf": (3.0, "slowest first call of a size but the very first / Hugging Face's own first of it"),
    "warm_slowest_of_hf": (3.0, "warm cache, new process: slowest but the first / Hugging Face's median of its size"),
    "first_of_hf": (1.5, "first call / Hugging Face's first"),
    "warm_first_of_hf": (1.5, "warm cache, new process: first call, which runs fused / Hugging Face's first"),
    "first_fused_s": (6.0, "s from the end of the first call to the end of the first fused one"),
    "all_fused_s": (20.0, "s from the first call until a call of each size ran fused"),
    "warmup_cold_s": (25.0, "s of warmup() of the default ladder, empty cache"),
    "warmup_warm_s": (4.0, "s of warmup() of the default ladder, warm cache, new process"),
    "warmup_folder_s": (4.0, "s of warmup() of the default ladder, from a folder of `fusedvit compile`"),
    "folder_compiles": (0.0, "kernels that warmup() from the folder compiled"),
    "two_cores_fused_s": (40.0, "two cores, one call a second: s until the first fused answer"),
    "two_cores_of_hf": (2.0, "two cores, one call a second: slowest but the first / Hugging Face's median"),
}
FUSED = {"first_fused_s": "loop", "all_fused_s": "loop", "two_cores_fused_s": "two_cores"}  # need calls that ran fused


class Tower:
    """A tower on the GPU, the inputs of every size, and calls that are timed."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        self.module: nn.Module = towers.build_one(towers.GEOMETRIES[GEOMETRY], torch.bfloat16, device)
        grids = {side: image(side) for side in SIDES}
        self.inputs = {
            side: (towers.pixels_for(self.module, grid, side), torch.tensor(grid, device=device))
            for side, grid in grids.items()
        }
        torch.cuda.synchronize()

    def timed(self, side: int) -> tuple[float, Any]:
        """(Seconds of one call, its outputs)."""
        pixels, grid = self.inputs[side]
        begin = time.perf_counter()
        with torch.inference_mode():
            outputs = self.module(pixels, grid_thw=grid)
        torch.cuda.synchronize()
        return time.perf_counter() - begin, outputs

    def error(self, side: int) -> float:
        """Error of a call's output relative to the original code's, by norms."""
        ours = self.timed(side)[1].pooler_output.float()
        pixels, grid = self.inputs[side]
        theirs = self.module(pixels.requires_grad_(), grid_thw=grid).pooler_output.detach().float()
        pixels.requires_grad_(False)
        return float((ours - theirs).norm() / theirs.norm())


def hugging_face(pause: float = 0.0, sides: tuple[int, ...] = SIDES) -> dict[str, Any]:
    """Hugging Face's first call, its first of each size, which chooses algorithms for the size, and its medians: with
    one call every `pause` seconds, and without pauses."""
    tower = Tower()
    first = tower.timed(sides[0])[0]
    firsts, medians, close = {}, {}, {}
    for side in sides:
        firsts[side] = tower.timed(side)[0]
        medians[side] = statistics.median(_paced(tower, side, pause) for _ in range(MEDIAN_OF))
        close[side] = statistics.median(tower.timed(side)[0] for _ in range(MEDIAN_OF)) if pause else medians[side]
    return {"first_s": first, "first_of_size_s": firsts, "median_s": medians, "median_without_pause_s": close}


def _paced(tower: Tower, side: int, pause: float) -> float:
    took = tower.timed(side)[0]
    time.sleep(max(0.0, pause - took))
    return took


def loop(seconds: float, pause: float = 0.0, sides: tuple[int, ...] = SIDES, until_fused: bool = False) -> Any:
    """Calls of the sizes `sides`, cyclically, for `seconds`; with `until_fused` only until one has run fused."""
    tower = Tower()
    begin = time.perf_counter()
    handle = fuse(tower.module)
    fuse_s = time.perf_counter() - begin
    calls: list[dict[str, Any]] = []
    begin, fused = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        side = sides[len(calls) % len(sides)]
        took, _ = tower.timed(side)
        before, fused = fused, handle.stats()["fused"]
        calls.append({"side": side, "s": took, "end_s": time.perf_counter() - begin, "fused": fused > before})
        if until_fused and fused:
            break
        time.sleep(max(0.0, pause - took))
    ready = [side for side in sides if any(call["fused"] for call in calls if call["side"] == side)]
    errors = {side: tower.error(side) for side in ready}
    return {"fuse_s": fuse_s, "calls": calls, "errors": errors, **counted(handle)}


def warm_up() -> dict[str, Any]:
    """`warmup()` of the default ladder."""
    tower = Tower()
    handle = fuse(tower.module)
    begin = time.perf_counter()
    handle.warmup()
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    first = tower.timed(SIDES[0])[0]
    return {"s": took, "first_call_s": first, "error": tower.error(SIDES[0]), **counted(handle)}


def counted(handle: FusedEncoder) -> dict[str, Any]:
    """The handle's counters, and CPU seconds of the compiling processes."""
    stats = handle.stats()
    time.sleep(1.0)  # until these processes have ended
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "stats": {
            name: stats[name] for name in ("calls", "fused", "original", "eager_runs", "compiles") if name in stats
        },
        "graphs": stats.get("graphs", {}),
        "weights_mib": stats["weights_mib"],
        "compiled_elsewhere": len(service_of(os.getpid()).done),
        "compiling_cpu_s": children.ru_utime + children.ru_stime,
    }


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "disk": lambda: {"first_s": Tower().timed(SIDES[0])[0]},
    "hugging_face": hugging_face,
    "loop": lambda: loop(LOOP_SECONDS),
    "loop_warm": lambda: loop(WARM_SECONDS),
    "warmup": warm_up,
    "hugging_face_two_cores": lambda: hugging_face(PAUSE, SIDES[:1]),
    "two_cores": lambda: loop(SLOW_SECONDS, PAUSE, SIDES[:1], until_fused=True),
}


def in_process(scenario: str, cache: str, report: Callable[[str], None], kernels: str = "") -> dict[str, Any]:
    """Runs a scenario in a process of its own with the Triton cache in the folder `cache`; `kernels` is a folder from
    `fusedvit compile`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "fusedvit.bench.first_call", "--scenario", scenario, "--json", file.name]
        cores = sorted(os.sched_getaffinity(0))[: 2 if scenario.endswith("two_cores") else None]
        env = {**os.environ, "TRITON_CACHE_DIR": cache, **({VARIABLE: kernels} if kernels else {})}
        begin = time.perf_counter()
        try:
            subprocess.run(
                command,
                env=env,
                timeout=SCENARIO_SECONDS,
                check=True,
                preexec_fn=partial(os.sched_setaffinity, 0, cores),
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            return {"failed": str(error)}
        report(f"{scenario}: {time.perf_counter() - begin:.0f} s in all")
        found: dict[str, Any] = json.loads(Path(file.name).read_text(encoding="utf-8"))
        return found


def judged(found: dict[str, Any]) -> dict[str, float]:
    """The figures that have bars, from the scenarios that did not fail."""
    figures: dict[str, float] = {}
    ok = {name: result for name, result in found.items() if "failed" not in result}
    if "hugging_face" in ok and "loop" in ok:
        figures |= _of_loop(ok["loop"]["calls"], ok["hugging_face"])
    if "hugging_face" in ok and "loop_warm" in ok:
        calls = ok["loop_warm"]["calls"]
        figures["warm_first_of_hf"] = calls[0]["s"] / ok["hugging_face"]["first_s"]
        figures["warm_slowest_of_hf"] = _slowest(calls, ok["hugging_face"])
    if "hugging_face_two_cores" in ok and "two_cores" in ok:
        calls = ok["two_cores"]["calls"]
        figures["two_cores_of_hf"] = _slowest(calls, ok["hugging_face_two_cores"])
        if any(call["fused"] for call in calls):
            figures["two_cores_fused_s"] = next(call["end_s"] for call in calls if call["fused"]) - calls[0]["end_s"]
    for name in ("cold", "warm", "folder"):
        if f"warmup_{name}" in ok:
            figures[f"warmup_{name}_s"] = ok[f"warmup_{name}"]["s"]
    if "warmup_folder" in ok:
        figures["folder_compiles"] = ok["warmup_folder"]["compiled_elsewhere"]
    return figures


def _slowest(calls: list[dict[str, Any]], theirs: dict[str, Any]) -> float:
    """The slowest call but the first, over Hugging Face's median of its size."""
    return float(max(call["s"] / theirs["median_s"][str(call["side"])] for call in calls[1:]))


def _of_loop(calls: list[dict[str, Any]], theirs: dict[str, Any]) -> dict[str, float]:
    first = calls[0]
    figures = {"first_of_hf": first["s"] / theirs["first_s"], "slowest_of_hf": _slowest(calls, theirs)}
    new = calls[1 : len(SIDES)]
    figures["new_size_of_hf"] = max(call["s"] / theirs["first_of_size_s"][str(call["side"])] for call in new)
    fused = {side: next((c["end_s"] for c in calls if c["fused"] and c["side"] == side), None) for side in SIDES}
    times = [at for at in fused.values() if at is not None]
    if times:
        figures["first_fused_s"] = min(times) - first["end_s"]
    if len(times) == len(SIDES):
        figures["all_fused_s"] = max(times)
    return figures


def problems(found: dict[str, Any]) -> list[str]:
    """Failed scenarios, wrong outputs and missed bars."""
    said = [f"{name}: {result['failed']}" for name, result in found.items() if "failed" in result]
    for name, result in found.items():
        errors = {**result.get("errors", {}), **({"warmup": result["error"]} if "error" in result else {})}
        said += [f"{name}: error {error:.3f} at {side}" for side, error in errors.items() if not error < CLOSE]
    figures = judged(found)
    said += [f"{name}: never" for name, of in FUSED.items() if "calls" in found.get(of, {}) and name not in figures]
    for name, (bar, what) in BARS.items():
        if name in figures and figures[name] > bar:
            said.append(f"{name} = {figures[name]:.2f}, bar {bar}: {what}")
    return said


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--scenario", choices=list(SCENARIOS), help="this one alone, in this process")
    parser.add_argument("--only", nargs="*", help="of the whole run, these scenarios")
    parser.add_argument("--folder", help="a cache folder that `fusedvit compile` made for this GPU")
    args = parser.parse_args(argv)
    need_gpus()
    if args.scenario:
        (print if args.json is None else args.json.write_text)(json.dumps(SCENARIOS[args.scenario]()))
        return 0
    found: dict[str, Any] = {}
    given = {"--folder": args.folder and Path(args.folder), "--json": args.json}
    of = passport("python -m fusedvit.bench.first_call", given, args.commit)

    def run(name: str, scenario: str, cache: str, kernels: str = "") -> None:
        if args.only and name not in args.only:
            return
        found[name] = in_process(scenario, cache, _report, kernels)
        about = {"passport": of, "figures": judged(found), "bars": BARS, "problems": problems(found)}
        write(args.json, about | {"scenarios": {scenario: _shortened(result) for scenario, result in found.items()}})

    with tempfile.TemporaryDirectory() as folder:
        for name in ("disk", "hugging_face"):
            run(name, name, f"{folder}/none")
        run("loop", "loop", f"{folder}/loop")
        run("loop_warm", "loop_warm", f"{folder}/loop")
        run("warmup_cold", "warmup", f"{folder}/warmup")
        run("warmup_warm", "warmup", f"{folder}/warmup")
        if args.folder:
            run("warmup_folder", "warmup", f"{folder}/linked", kernels=str(Path(args.folder).absolute()))
        run("hugging_face_two_cores", "hugging_face_two_cores", f"{folder}/none")
        run("two_cores", "two_cores", f"{folder}/two_cores")
    _print_figures(judged(found))
    wrong = problems(found)
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


def _print_figures(figures: dict[str, float]) -> None:
    for name, figure in figures.items():
        bar, what = BARS[name]
        print(f"{figure:8.2f}  at most {bar:5.1f}  {'ok ' if figure <= bar else 'BAD'}  {what}")


def _shortened(result: dict[str, Any]) -> dict[str, Any]:
    """`result` with its thousands of calls reduced to their number and the slowest ones."""
    calls = result.get("calls", [])
    slowest = sorted(calls, key=lambda call: -float(call["s"]))[:KEPT]
    return {**result, "calls": {"count": len(calls), "slowest": slowest}} if calls else result


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main)
