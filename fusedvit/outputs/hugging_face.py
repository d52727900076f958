"""A fused call's outputs in the record that the original `forward` returns."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fusedvit.calls.original_inputs import for_original
from fusedvit.checks.arguments import asked_for, configured, gives, recordable
from fusedvit.checks.forward_hooks import marks_for_gradients
from fusedvit.checks.recorded import version_of
from fusedvit.model.encoder import EncoderOutputs
from fusedvit.model.spec import VisionSpec
from fusedvit.outputs.gradients import with_gradients
from fusedvit.outputs.lazy import HIDDEN_STATES, Ambient, HiddenStates, TensorState, with_lazy_hidden_states
from fusedvit.pixels.byte_pixels import BytePixels

if TYPE_CHECKING:
    from fusedvit.fused_encoder import FusedEncoder

_CAPTURING = "transformers.utils.output_capturing"


def to_hugging_face(
    original: Any,
    tower: nn.Module,
    handle: "FusedEncoder",
    outputs: EncoderOutputs,
    call: tuple[Any, Any, dict[str, Any]],
) -> Any:
    """The record that `original.forward` returns, of the class in its module, or a tuple for `return_dict=False`.

    Args:
        original: the tower's class in transformers.
        call: the pixels, the grid and the keyword arguments of the call.
    """
    arguments = call[2]
    if marks_for_gradients(tower):
        hidden, *merged = with_gradients((outputs.hidden, *outputs.merged))
        outputs = EncoderOutputs(hidden, tuple(merged))
    record = _record(original, handle, outputs)
    for name, specs in asked_for(tower, arguments):
        if name != HIDDEN_STATES or not gives(tower, specs):
            record[name] = ()  # as Hugging Face records if no module gives any; other calls have fallen back
        else:
            record = with_lazy_hidden_states(record, _hidden_states(original, tower, handle, call, record))
    wants_dict = arguments.get("return_dict", getattr(tower.config, "return_dict", True))
    return record.to_tuple() if wants_dict is False else record


def side_by_side(outputs: EncoderOutputs, spec: VisionSpec) -> torch.Tensor:
    """The embeddings that serving engines give to a language model: `[tokens, (1 + n) * out]`, with n deepstack
    features in the order of their blocks; for a tower without mergers, its last hidden states."""
    if not spec.merged_outputs:
        return outputs.hidden
    features = outputs.deepstack_by_block(spec)
    return torch.cat([outputs.pooled, *features], dim=1) if features else outputs.pooled


def _record(original: type, handle: "FusedEncoder", outputs: EncoderOutputs) -> Any:
    scope, name = _record_class(original, handle.family.output_class)
    record = scope[name]
    fields: dict[str, Any] = {"last_hidden_state": outputs.last_hidden_state(handle.spec)}
    if handle.spec.merged_outputs and handle.spec.returns_hidden:
        fields["pooler_output"] = outputs.pooled
    if "deepstack_features" in record.__dataclass_fields__:
        fields["deepstack_features"] = outputs.deepstack_by_block(handle.spec)  # as Hugging Face lists them
    return record(**fields)


@functools.cache
def _record_class(original: Any, names: str | tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """Where the tower's own code finds its output record's class, and under which name: of several `names`, the one
    that the code mentions."""
    own = inspect.unwrap(original.forward)
    one = names if isinstance(names, str) else next(name for name in names if name in own.__code__.co_names)
    return own.__globals__, one


def _hidden_states(
    original: Any, tower: nn.Module, handle: "FusedEncoder", call: tuple[Any, Any, dict[str, Any]], record: Any
) -> HiddenStates:
    """How to compute later the hidden states that a call asked for, in the dtypes that they would have had."""
    pixels, grid, arguments = call
    device = handle.weights.first_parameter().device
    inputs = (
        TensorState.of(pixels.unmarked() if isinstance(pixels, BytePixels) else pixels),
        *([TensorState.of(grid)] if isinstance(grid, torch.Tensor) else []),
    )
    rows = grid if isinstance(grid, torch.Tensor) else [*map(tuple, grid)]
    selection = _selection(tower, arguments)
    asked = dict(arguments) | {f"output_{HIDDEN_STATES}": selection, "return_dict": True}
    taken = pixels
    if isinstance(pixels, BytePixels) and not handle.spec.padded:  # bytes as the call took them, without pending casts
        taken = BytePixels.mark(pixels.unmarked(), pixels.normalization, pixels.still)

    def run() -> Any:
        return original.forward(tower, *for_original(tower, taken, rows, handle.spec.padded), **asked)

    # As in the original call, transformers' capturing hooks come before any hook that is registered from now on.
    sys.modules[_CAPTURING].maybe_install_capturing_hooks(tower)
    selected = _resolves_indices() and not isinstance(selection, bool)
    changed = _changed_since_now(tower, handle, selected)
    last, ambient = record.last_hidden_state, Ambient.now(device.type)
    count = _count(tower) if isinstance(selection, bool) else None
    return HiddenStates(
        original.__name__, run, inputs, ambient, changed, (last, version_of(last)), count, last.requires_grad
    )


def _count(tower: nn.Module) -> int | None:
    """How many hidden states transformers records for a tower: each block's output, and the first block's input."""
    recorded = recordable(tower).get(HIDDEN_STATES)
    return 1 + sum(isinstance(m, recorded) for m in tower.modules()) if isinstance(recorded, type) else None


def _selection(tower: nn.Module, arguments: dict[str, Any]) -> Any:
    """Which hidden states a call asks for: a flag, an index, or a list of indices, copied from the caller's."""
    name = f"output_{HIDDEN_STATES}"
    given = arguments.get(name, getattr(tower.config, name, True))
    # Older releases of transformers treat any other iterable as a flag.
    selects = isinstance(given, list | tuple | set) or (_resolves_indices() and isinstance(given, Iterable))
    return list(given) if selects else given


def _resolves_indices() -> bool:
    """Whether transformers resolves indices of hidden states by the tower's config, as 5.24 does and 5.20 does not."""
    return hasattr(sys.modules[_CAPTURING], "resolve_hidden_states_indices")


def _changed_since_now(tower: nn.Module, handle: "FusedEncoder", selected: bool) -> Callable[[], str]:
    """A function to call later: it says what about the tower has changed since now, "" for nothing.

    Args:
        selected: hidden states are selected by indices, which transformers resolves by the config.
    """
    unchanged, attention = handle.weights.unchanged_since_now(), _attention(tower)
    options = _options_of_capturing(tower, selected)

    def changed() -> str:
        now = _options_of_capturing(tower, selected)
        other = next((name for name in options if now[name] != options[name]), None)
        if other is not None:
            return f"the tower has changed (its config's {other} is {now[other]} and was {options[other]})"
        if unchanged():
            return ""
        if _attention(tower) != attention:
            return f"the tower has changed (its attention is {_attention(tower)} and was {attention})"
        reason = handle.reason(pauses=False)
        return "the tower's weights have changed" if reason is None else f"the tower has changed ({reason})"

    return changed


def _options_of_capturing(tower: nn.Module, selected: bool) -> dict[str, Any]:
    """Options of the tower's config that transformers' output capturing reads.

    The tower's own code does not mention them, so change detection does not compare them. `output_<name>` and
    `return_dict` are left out, as the run gets them as arguments.
    """
    names = ["tie_last_hidden_states"]
    if selected:
        specs = recordable(tower).get(HIDDEN_STATES)
        names.append(getattr(specs, "num_hidden_layers_key", "num_hidden_layers"))
    return {name: getattr(tower.config, name, None) for name in names}


def _attention(tower: nn.Module) -> Any:
    return configured(tower.__dict__.get("config"), "_attn_implementation")
