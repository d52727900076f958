"""`fusedvit demo`: real media through the original tower and the fused one, side by side."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusedvit
from fusedvit.cli import environment, kernel_checks
from fusedvit.cli.encoding import kernel_calls
from fusedvit.cli.measure import Latency, Launches, gpu_launches, latency, operators, peak_mib
from fusedvit.cli.media import SAMPLE_IMAGE, SAMPLE_VIDEO, Media, load
from fusedvit.cli.packing import PackedCall, packed_calls
from fusedvit.cli.processors import VisionInput, prepare
from fusedvit.cli.towers import checkpoint_tower, geometry_of, layout_of, random_tower
from fusedvit.cli.weights import cast_parameters_
from fusedvit.tolerance import Comparison, Summary, compare, summarize

Step = Callable[[str], None]
Work = Callable[[Step], "Demo"]
SIDES = ("original", "fused")
MANY = 100
REFERENCE = torch.float64  # not fp32: no TF32 to keep out, and the fp32 tower can be judged by it as well


@dataclass(frozen=True)
class OutputParity:
    """One output of one call, judged by fusedvit.tolerance."""

    output: str
    shape: tuple[int, ...]
    comparison: Comparison


@dataclass(frozen=True)
class CallResult:
    """One call of both towers. Per side ("original", "fused"); `launches` on a GPU, `operators` on a CPU."""

    name: str
    grid_thw: list[list[int]]
    patches: int
    tokens: int
    parity: list[OutputParity]
    latency_ms: dict[str, Latency]
    launches: dict[str, Launches] | None
    operators: dict[str, int] | None
    peak_mib: dict[str, float] | None


@dataclass(frozen=True)
class BadInput:
    """An input that must be refused, and the error that came back (empty: it was accepted)."""

    what: str
    error: str
    message: str

    @property
    def refused(self) -> bool:
        return self.error in ("ValueError", "TypeError")


@dataclass(frozen=True)
class Demo:
    """Everything that the demo found out."""

    environment: dict[str, Any]
    tower: str
    geometry: dict[str, Any]
    dtype: str
    reference_dtype: str
    calls: list[CallResult]
    spread: Summary
    bad_inputs: list[BadInput]
    report: str
    stats: dict[str, Any]
    fused_kernels: dict[str, int] | None  # by operation: what one fused call launches on a GPU; told on a CPU
    kernels: list[kernel_checks.KernelCheck]
    packing: list[PackedCall]  # by the calls' grids, and MANY times all of them in one call
    seconds: float

    @property
    def same_answers(self) -> bool:
        return self.spread.failures == 0

    @property
    def passed(self) -> bool:
        refused = all(bad.refused for bad in self.bad_inputs)
        return self.same_answers and refused and all(check.passed for check in self.kernels)


@dataclass(frozen=True)
class Towers:
    """The same parameters three times."""

    original: nn.Module
    fused: nn.Module
    reference: nn.Module  # the original with its parameters as REFERENCE
    dtype: torch.dtype
    device: torch.device

    def calls(self, item: VisionInput) -> dict[str, Callable[[], Any]]:
        return {"original": lambda: _call(self.original, item), "fused": lambda: _call(self.fused, item)}


def load_media(paths: Sequence[Path]) -> list[Media]:
    """The given files, or those that we ship. Raises MediaError."""
    media: dict[str, Media] = {}
    for path in paths or (SAMPLE_IMAGE, SAMPLE_VIDEO):
        item = load(path)
        while item.name in media:  # results go by name
            item = replace(item, name=f"another {item.name}")
        media[item.name] = item
    return list(media.values())


def run(media: Sequence[Media], model_id: str | None, step: Step) -> Demo:
    """Compare both towers on `media`: each alone, and all at once. `step` is told what happens next.

    Raises:
        UnsupportedModel: the checkpoint holds no tower that can be fused.
        OSError: there is no such checkpoint.
    """
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step("building the tower")
    tower = checkpoint_tower(model_id, device) if model_id else random_tower(device)
    step("fusing")
    handle = fusedvit.fuse(tower.model)
    towers = side_by_side(handle, tower.dtype, device)
    inputs = inputs_of(media, towers)
    calls = [_compare_call(name, item, towers, step) for name, item in inputs.items()]
    step("bad inputs")
    bad_inputs = _try_bad_inputs(towers.fused, next(iter(inputs.values())))
    return Demo(
        environment=environment.collect(),
        tower=tower.name,
        geometry=geometry_of(towers.fused),
        dtype=str(tower.dtype),
        reference_dtype=str(REFERENCE),
        calls=calls,
        spread=summarize(p.comparison for call in calls for p in call.parity),
        bad_inputs=bad_inputs,
        report=handle.report(),
        stats=handle.stats(),
        fused_kernels=None if device.type == "cuda" else kernel_calls(handle),
        kernels=[] if device.type == "cuda" else kernel_checks.run(step),
        packing=packed_calls(handle, _grids(calls), tower.dtype),
        seconds=time.perf_counter() - start,
    )


def _grids(calls: Sequence[CallResult]) -> dict[str, list[list[int]]]:
    grids = {call.name: call.grid_thw for call in calls}
    return grids | {f"{MANY} times {calls[-1].name}": MANY * calls[-1].grid_thw}


def side_by_side(handle: Any, dtype: torch.dtype, device: torch.device) -> Towers:
    """A fused tower beside its original and a reference, which are copies."""
    original = fusedvit.unfuse(copy.deepcopy(handle.tower))
    reference = copy.deepcopy(original)
    cast_parameters_(reference, REFERENCE)
    return Towers(original, handle.tower, reference, dtype, device)


def inputs_of(media: Sequence[Media], towers: Towers) -> dict[str, VisionInput]:
    """Each medium preprocessed for these towers; several of them once more all at once."""
    layout = layout_of(towers.original)
    inputs = {item.name: prepare(item, layout) for item in media}
    if len(inputs) > 1:
        inputs["all at once"] = _together(list(inputs.values()))
    return {name: _placed(item, towers.dtype, towers.device) for name, item in inputs.items()}


def _compare_call(name: str, item: VisionInput, towers: Towers, step: Step) -> CallResult:
    step(f"{name}: parity")
    parity = parity_of(towers, item)
    calls = towers.calls(item)
    on_gpu = towers.device.type == "cuda"
    step(f"{name}: cost")
    merge: int = getattr(towers.fused.config, "spatial_merge_size", 1)
    patches = int(item.pixel_values.shape[0])
    return CallResult(
        name=name,
        grid_thw=item.grid_thw.tolist(),
        patches=patches,
        tokens=patches // merge**2,
        parity=parity,
        latency_ms=latency(calls, towers.device),
        launches={side: gpu_launches(calls[side]) for side in SIDES} if on_gpu else None,
        operators=None if on_gpu else {side: operators(calls[side]) for side in SIDES},
        peak_mib={side: peak_mib(calls[side], towers.device) for side in SIDES} if on_gpu else None,
    )


def parity_of(towers: Towers, item: VisionInput) -> list[OutputParity]:
    """Every output of one call, by the tolerance rule."""
    ref = _outputs(_call(towers.reference, VisionInput(item.pixel_values.to(REFERENCE), item.grid_thw)))
    pt, ours = (_outputs(call()) for call in towers.calls(item).values())
    if not ref.keys() == pt.keys() == ours.keys():
        raise RuntimeError(f"outputs {sorted(pt)} expected, got {sorted(ours)}")
    return [
        OutputParity(name, tuple(ours[name].shape), compare(ours[name], ref[name], pt[name], towers.dtype))
        for name in ours
    ]


def _call(module: nn.Module, item: VisionInput) -> Any:
    with torch.inference_mode():
        return module(item.pixel_values, grid_thw=item.grid_thw)


def _outputs(answer: Any) -> dict[str, torch.Tensor]:
    """The tensors of a tower's answer, by name; a list of deepstack features gives one each."""
    found: dict[str, torch.Tensor] = {}
    for name in ("pooler_output", "last_hidden_state", "deepstack_features"):
        value = getattr(answer, name, None)
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif value is not None:
            found.update({f"{name}[{i}]": feature for i, feature in enumerate(value)})
    return found


def _together(items: Sequence[VisionInput]) -> VisionInput:
    return VisionInput(torch.cat([i.pixel_values for i in items]), torch.cat([i.grid_thw for i in items]))


def _placed(item: VisionInput, dtype: torch.dtype, device: torch.device) -> VisionInput:
    return VisionInput(item.pixel_values.to(device, dtype), item.grid_thw.to(device))


def _try_bad_inputs(fused: nn.Module, item: VisionInput) -> list[BadInput]:
    rows, grid = item.pixel_values, item.grid_thw
    odd = torch.tensor([[1, 3, 4]], device=grid.device)
    cases = {
        "4 patch rows missing": (rows[:-4], grid),
        "a grid of 3 x 4, merged by 2 x 2": (rows[:12], odd),
        "pixels as integers, 0 to 255": (((rows.float() + 1) * 127.5).to(torch.uint8), grid),
    }
    return [_try_bad_input(what, fused, VisionInput(*case)) for what, case in cases.items()]


def _try_bad_input(what: str, fused: nn.Module, item: VisionInput) -> BadInput:
    try:
        _call(fused, item)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:  # what is not the first two counts against us
        return BadInput(what, type(error).__name__, str(error).strip().split("\n")[0][:300])
    return BadInput(what, "", "accepted")
