"""A fused call's outputs in the record that the original `forward` returns."""

import functools
import inspect
import sys
from typing import Any

import torch
from torch import nn

from fusedvit.checks.arguments import asked_for, rules_of
from fusedvit.checks.change_detection import version_of
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.lazy_outputs import HIDDEN_STATES, HiddenStates, TensorState, with_lazy_hidden_states
from fusedvit.model.encoder import EncoderOutputs
from fusedvit.model.spec import VisionSpec
from fusedvit.pixels.byte_pixels import BytePixels, as_floats


def to_hugging_face(
    original: Any,
    tower: nn.Module,
    handle: FusedEncoder,
    outputs: EncoderOutputs,
    call: tuple[Any, Any, dict[str, Any]],
) -> Any:
    """What `original.forward` returns, from its own module, or a tuple for `return_dict=False`.

    Args:
        original: the tower's class in transformers.
        call: the pixels, the grid and the keyword arguments of the call.
    """
    arguments = call[2]
    record = _record(original, handle, outputs)
    for name, given in asked_for(tower, rules_of(tower), arguments):
        if name != HIDDEN_STATES:
            record[name] = ()  # what Hugging Face records where no module gives any; any other call fell back
        elif given:
            record = with_lazy_hidden_states(record, _hidden_states(original, tower, handle, call, record))
    wants_dict = arguments.get("return_dict", getattr(tower.config, "return_dict", True))
    return record.to_tuple() if wants_dict is False else record


def side_by_side(outputs: EncoderOutputs, spec: VisionSpec) -> torch.Tensor:
    """What serving engines hand to a language model: `[tokens, (1 + n) * out]`, n the deepstack features by block."""
    features = outputs.deepstack_by_block(spec)
    return torch.cat([outputs.pooled, *features], dim=1) if features else outputs.pooled


def _record(original: type, handle: FusedEncoder, outputs: EncoderOutputs) -> Any:
    record = getattr(sys.modules[original.__module__], _record_class(original, handle.family.output_class))
    fields: dict[str, Any] = {"last_hidden_state": outputs.last_hidden_state(handle.spec)}
    if handle.spec.merged_outputs and handle.spec.returns_hidden:
        fields["pooler_output"] = outputs.pooled
    if handle.family.has_deepstack:
        fields["deepstack_features"] = outputs.deepstack_by_block(handle.spec)  # as Hugging Face lists them
    return record(**fields)


@functools.cache
def _record_class(original: Any, names: str | tuple[str, ...]) -> str:
    """Of several names of records the one that the tower's own code mentions."""
    if isinstance(names, str):
        return names
    named = inspect.unwrap(original.forward).__code__.co_names
    return next(name for name in names if name in named)


def _hidden_states(
    original: Any, tower: nn.Module, handle: FusedEncoder, call: tuple[Any, Any, dict[str, Any]], record: Any
) -> HiddenStates:
    """How to compute what the call that gave `record` asked for, in the dtypes that it would have had."""
    pixels, grid, arguments = call
    device = handle.weights.first_parameter().device
    inputs = (
        TensorState.of(pixels.unmarked() if isinstance(pixels, BytePixels) else pixels),
        *([TensorState.of(grid)] if isinstance(grid, torch.Tensor) else []),
    )
    rows = grid if isinstance(grid, torch.Tensor) else torch.tensor(grid, device="cpu")
    selection = arguments.get(f"output_{HIDDEN_STATES}", getattr(tower.config, f"output_{HIDDEN_STATES}", True))
    asked = dict(arguments) | {f"output_{HIDDEN_STATES}": selection, "return_dict": True}
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else None

    taken = pixels
    if isinstance(pixels, BytePixels) and not handle.spec.padded:  # as the call took them: casts were left undone
        taken = BytePixels.mark(pixels.unmarked(), pixels.normalization, pixels.still)

    def run() -> Any:
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=autocast):
            return original.forward(tower, as_floats(taken).to(device), rows.to(device), **asked)

    # As the original call would: capturing before any hook that is registered from now on.
    sys.modules["transformers.utils.output_capturing"].maybe_install_capturing_hooks(tower)
    last = record.last_hidden_state
    unchanged = handle.weights.unchanged_since_now()
    return HiddenStates(original.__name__, run, inputs, unchanged, (last, version_of(last)))
