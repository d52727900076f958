"""Parameters and buffers that `.data` or `__class__` make another view of the same memory: the same object, address,
version and content, and another answer (F30)."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.checks import fallback
from tests.support.families import SHAPES, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_same,
    copy_of,
    error_of,
    fused_and_original,
    outputs_of,
    ran_fused,
    ran_original,
)


def square(tower: Any) -> nn.Parameter:
    return next(p for p in tower.parameters() if p.ndim == 2 and p.shape[0] == p.shape[1])


def biases(tower: Any) -> Iterator[nn.Parameter]:
    """A bias of a linear layer, or where there are none the weight of a norm, which is as long."""
    for module in tower.modules():
        bias = getattr(module, "bias", None) if isinstance(module, nn.Linear) else None
        yield from [] if bias is None else [bias]
    yield from (p for p in tower.parameters() if p.ndim == 1)


def transposed(tower: Any) -> None:
    square(tower).data = square(tower).data.t()


def expanded(tower: Any) -> None:
    bias = next(biases(tower))
    bias.data = bias.data[:1].expand(bias.shape)


def cut(tower: Any) -> None:
    """One value, which is added to every channel; of a norm's weight as torch takes it."""
    bias = next(biases(tower))
    bias.data = bias.data[:1]


def negated(tower: Any) -> None:
    square(tower).data = torch._neg_view(square(tower).data)


class Doubled(nn.Parameter):
    """Whose products are twice as large."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(function, kinds, args, kwargs or {})
        return 2 * out if function is nn.functional.linear else out


def of_another_class(tower: Any) -> None:
    square(tower).__class__ = Doubled


def frequencies_of_one(tower: Any) -> None:
    buffer = next(b for name, b in tower.named_buffers() if name.endswith("inv_freq"))
    buffer.data = buffer.data[:1].expand(buffer.shape)


VIEWS = [transposed, expanded, cut, negated, of_another_class, frequencies_of_one]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("name", SHAPES)
def test_another_view_of_the_same_memory(name: str, view: Callable[[Any], None]) -> None:
    tower, handle, call, original = fused_and_original(family_tower(name), GRIDS["images"])
    before = call.run(tower)
    view(tower)
    view(original)
    found, expected = answer(tower, call), answer(original, call)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert_same(found, expected)
        changed(expected, before)
    if view is transposed:  # dense still: laid out in rows for the kernels
        ran_fused(handle, calls=2)
    else:
        ran_original(handle, fallback.MODIFIED)


def changed(now: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    error = error_of(now["last_hidden_state"], before["last_hidden_state"])
    assert error > 1e-3, "nothing changed: the test shows nothing"


def answer(tower: Any, call: Call) -> Any:
    """The tower's outputs, or the error that it raises."""
    with torch.no_grad():
        try:
            return outputs_of(call.record(tower))
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_parameters(layout: torch.layout, used: bool) -> None:
    """As sparse inference on a CPU has them: the original code multiplies by them."""
    tower = family_tower("Gemma4VisionModel")
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRIDS["images"])
    if used:
        call.run(tower)
    square(tower).data.mul_(square(tower).data > 0)
    original = copy_of(tower)
    for other in (tower, original):
        layer = next(m for m in other.modules() if isinstance(m, nn.Linear) and m.weight is square(other))
        layer.weight = nn.Parameter(layer.weight.data.to_sparse(layout=layout), requires_grad=False)
    assert_same(call.run(tower), call.run(original))
    ran_original(handle, fallback.MODIFIED)
    assert "the layout of" in handle.report()


def test_pruned_in_place() -> None:
    """Half of each MLP's channels cut off, as structured pruning does it: the original code computes the rest."""
    tower, handle, call, original = fused_and_original(family_tower("Qwen3VLVisionModel"), GRIDS["images"])
    before = call.run(tower)
    for pruned in (tower, original):
        for block in pruned.blocks:
            up, down = block.mlp.linear_fc1, block.mlp.linear_fc2
            half = up.out_features // 2
            up.weight.data, up.bias.data = up.weight.data[:half], up.bias.data[:half]
            down.weight.data = down.weight.data[:, :half]
    assert_same(call.run(tower), call.run(original))
    changed(call.run(original), before)
    ran_original(handle, fallback.MODIFIED)
