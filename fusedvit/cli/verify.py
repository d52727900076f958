"""`fusedvit verify`: a user's own checkpoint and media, the fused tower against the original."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

import fusedvit
from fusedvit.cli import env
from fusedvit.cli.checkpoint import device_of, dtype_of, load_tower
from fusedvit.cli.console import Outcome, progress
from fusedvit.cli.media import SAMPLE_IMAGE, SAMPLE_VIDEO, Media, VisionInput, load, prepare
from fusedvit.cli.towers import cast_parameters_, layout_of, takes_single_frames
from fusedvit.tolerance import FACTOR_MAX, FACTOR_RMS, Comparison, Summary, compare, summarize

REFERENCE = torch.float64  # not fp32: no TF32 to keep out, and the fp32 tower can be judged by it as well


@dataclass(frozen=True)
class OutputParity:
    """One output of one call, judged by fusedvit.tolerance."""

    output: str
    shape: tuple[int, ...]
    comparison: Comparison


@dataclass(frozen=True)
class Towers:
    """The same parameters three times."""

    original: nn.Module
    fused: nn.Module
    reference: nn.Module  # the original with its parameters as REFERENCE
    handle: Any  # of `fused`
    dtype: torch.dtype
    device: torch.device

    def calls(self, item: VisionInput) -> dict[str, Callable[[], Any]]:
        return {"original": lambda: call_tower(self.original, item), "fused": lambda: call_tower(self.fused, item)}


def run(
    model: str,
    media: Sequence[str | Path] | None,
    device: str | None = None,
    dtype: str | None = None,
    json: Any = None,
) -> Outcome:
    """Compares, prints and returns every output of every call."""
    with quiet(), progress() as step:
        files = load_media(media or [])
        on = device_of(device)
        tower = load_tower(model, on, dtype_of(dtype, on), step)
        step("fusing")
        towers = side_by_side(fusedvit.fuse(tower.model), tower.dtype, on)
        found = {}
        for name, item in inputs_of(files, towers).items():
            step(name)
            found[name] = parity_of(towers, item)
        report, original = towers.handle.report(), sum(towers.handle.stats()["original"].values())
    spread = summarize(p.comparison for parity in found.values() for p in parity)
    console = Console()
    show(found, spread, report, console)
    if original:
        console.print(f"[yellow]{original} calls of the fused tower ran the original code: see the report above[/]")
    calls = {name: [asdict(p) for p in parity] for name, parity in found.items()}
    head: dict[str, Any] = {"model": model, "dtype": str(tower.dtype), "device": str(on)}
    head |= {"environment": env.collect(), "passed": not spread.failures, "ran_original_code": original}
    return Outcome({**head, "calls": calls, "spread": asdict(spread), "report": report}, not spread.failures)


@contextmanager
def quiet() -> Iterator[None]:
    """Without fusedvit's warnings: what they say is in the handle's report, which is printed."""
    logger = logging.getLogger("fusedvit")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def load_media(paths: Sequence[str | Path]) -> list[Media]:
    """The given files, or those that we ship. Raises MediaError."""
    media: dict[str, Media] = {}
    for path in paths or (SAMPLE_IMAGE, SAMPLE_VIDEO):
        item = load(path)
        while item.name in media:  # results go by name
            item = replace(item, name=f"another {item.name}")
        media[item.name] = item
    return list(media.values())


def side_by_side(handle: Any, dtype: torch.dtype, device: torch.device) -> Towers:
    """A fused tower, its original and a reference, which are copies."""
    original = fusedvit.unfuse(copy.deepcopy(handle.tower))
    reference = copy.deepcopy(original)
    cast_parameters_(reference, REFERENCE)
    return Towers(original, handle.tower, reference, handle, dtype, device)


def inputs_of(media: Sequence[Media], towers: Towers) -> dict[str, VisionInput]:
    """Each medium preprocessed for these towers; several of them once more all at once."""
    spec = towers.handle.spec
    inputs = {item.name: prepare(item, layout_of(spec)) for item in media}
    if takes_single_frames(spec):
        inputs = {name: _frame_by_frame(item) for name, item in inputs.items()}
    if len(inputs) > 1:
        rows, grids = zip(*((i.pixel_values, i.grid_thw) for i in inputs.values()), strict=True)
        inputs["all at once"] = VisionInput(torch.cat(rows), torch.cat(grids))
    return {
        name: VisionInput(item.pixel_values.to(towers.device, towers.dtype), item.grid_thw.to(towers.device))
        for name, item in inputs.items()
    }


def _frame_by_frame(item: VisionInput) -> VisionInput:
    rows = [[1, h, w] for t, h, w in item.grid_thw.tolist() for _ in range(t)]
    return VisionInput(item.pixel_values, torch.tensor(rows))


def parity_of(towers: Towers, item: VisionInput) -> list[OutputParity]:
    """Every output of one call, by the tolerance rule."""
    ref = _outputs(call_tower(towers.reference, VisionInput(item.pixel_values.to(REFERENCE), item.grid_thw)))
    pt, ours = (_outputs(call()) for call in towers.calls(item).values())
    if not ref.keys() == pt.keys() == ours.keys():
        raise RuntimeError(f"outputs {sorted(pt)} expected, got {sorted(ours)}")
    return [
        OutputParity(name, tuple(ours[name].shape), compare(ours[name], ref[name], pt[name], towers.dtype))
        for name in ours
    ]


def call_tower(module: nn.Module, item: VisionInput) -> Any:
    """The module's own record of outputs."""
    with torch.inference_mode():
        return module(item.pixel_values, grid_thw=item.grid_thw)


def _outputs(answer: Any) -> dict[str, torch.Tensor]:
    """The tensors of a tower's record, by name; a list of deepstack features gives one each."""
    found: dict[str, torch.Tensor] = {}
    for name in ("pooler_output", "last_hidden_state", "deepstack_features"):
        value = getattr(answer, name, None)
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif value is not None:
            found.update({f"{name}[{i}]": feature for i, feature in enumerate(value)})
    return found


def show(found: dict[str, list[OutputParity]], spread: Summary, report: str, console: Console) -> None:
    """A line per output, then what was fused and the verdict."""
    title = (
        f"error against {str(REFERENCE)[6:]}, fused / original: up to {FACTOR_MAX:g} (max), {FACTOR_RMS:g} (rms) pass"
    )
    table = Table(title=title, title_justify="left")
    for head in ("input", "output", "shape", "max", "rms", ""):
        table.add_column(head)
    for name, parity in found.items():
        for p in parity:
            c = p.comparison
            verdict = "[green]passed[/]" if c.passed else f"[red]{escape(c.reason)}[/]"
            shape = " x ".join(map(str, p.shape))
            table.add_row(escape(name), p.output, shape, f"{c.ratio_max:.2f}", f"{c.ratio_rms:.2f}", verdict)
    console.print(table)
    console.print(escape(report), soft_wrap=True)
    total = sum(len(parity) for parity in found.values())
    passed = spread.failures == 0
    console.print(f"[{'green' if passed else 'red'}]{total - spread.failures} of {total} outputs pass[/]")
