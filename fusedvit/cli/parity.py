"""Compares every output of a call of a fused tower with its original's and a reference's."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fusedvit
from fusedvit.bench.towers import call_tower, cast_parameters_
from fusedvit.checks.fallback import MODIFIED, refused
from fusedvit.cli.media import VisionInput, prepare
from fusedvit.cli.towers import input_layout_of, takes_single_frames
from fusedvit.errors import InputError
from fusedvit.pixels.media import Media
from fusedvit.tolerance import Comparison, compare

REFERENCE = torch.float64  # not fp32: it has no TF32 to exclude, and can judge an fp32 tower as well


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
        """A call of each tower. The original gets floats, as from Hugging Face's processor; the fused tower bytes."""
        floats = item.floats(self.dtype)
        taken = floats if self.handle.spec.padded else item
        return {"original": lambda: outputs_for(self.original, floats), "fused": lambda: outputs_for(self.fused, taken)}


def side_by_side(handle: Any, dtype: torch.dtype, device: torch.device) -> Towers:
    """A fused tower, and copies of it as its original and as a reference.

    Raises:
        InputError: the tower has modules, such as quantised layers, that need not run in the dtype of the reference.
    """
    reason = handle.reason()
    if reason is not None and reason.kind == MODIFIED:
        raise InputError(str(refused(type(handle.tower).__name__, reason)))
    original = fusedvit.unfuse(copy.deepcopy(handle.tower))
    reference = copy.deepcopy(original)
    cast_parameters_(reference, REFERENCE)
    return Towers(original, handle.tower, reference, handle, dtype, device)


def prepared_for_towers(media: Sequence[Media], towers: Towers) -> dict[str, VisionInput]:
    """Each medium preprocessed for these towers; if there are several, also all in one call."""
    spec = towers.handle.spec
    inputs = {item.name: prepare(item, input_layout_of(spec)) for item in media}
    if takes_single_frames(spec):
        inputs = {name: _frame_by_frame(item) for name, item in inputs.items()}
    if len(inputs) > 1:
        rows, grids = zip(*((i.pixel_values, i.grid_thw) for i in inputs.values()), strict=True)
        inputs["all at once"] = VisionInput(torch.cat(rows), torch.cat(grids))
    return {
        name: VisionInput(item.pixel_values.to(towers.device), item.grid_thw.to(towers.device))
        for name, item in inputs.items()
    }


def _frame_by_frame(item: VisionInput) -> VisionInput:
    rows = [[1, h, w] for t, h, w in item.grid_thw.tolist() for _ in range(t)]
    return VisionInput(item.pixel_values, torch.tensor(rows))


def parity_of(towers: Towers, item: VisionInput) -> list[OutputParity]:
    """Every output of one call, by the tolerance rule."""
    ref = _outputs(outputs_for(towers.reference, item.floats(REFERENCE)))
    pt, ours = (_outputs(call()) for call in towers.calls(item).values())
    if not ref.keys() == pt.keys() == ours.keys():
        raise RuntimeError(f"outputs {sorted(pt)} expected, got {sorted(ours)}")
    return [
        OutputParity(name, tuple(ours[name].shape), compare(ours[name], ref[name], pt[name], towers.dtype))
        for name in ours
    ]


def outputs_for(module: nn.Module, item: VisionInput) -> Any:
    """The module's own record of outputs."""
    with torch.inference_mode():
        return call_tower(module, item.pixel_values, item.grid_thw)


def _outputs(answer: Any) -> dict[str, torch.Tensor]:
    """The tensors of a tower's record, by name; each tensor of a list of deepstack features has its own name."""
    found: dict[str, torch.Tensor] = {}
    for name in ("pooler_output", "last_hidden_state", "deepstack_features"):
        value = getattr(answer, name, None)
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif value is not None:
            found.update({f"{name}[{i}]": feature for i, feature in enumerate(value)})
    return found
