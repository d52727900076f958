"""Prepared weights stay where no parameter changed, whatever else did; and go where one did meanwhile."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import peft
import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.checks import fallback
from fusedvit.pauses import MOST_PREPARING
from tests.support.families import family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_different,
    assert_same,
    expected_of,
    ran_fused,
    tiny_tower,
)

BY_VERSIONS = fusedvit.FuseConfig(watch_data=False)
LINEAR = r".*(attn\.(qkv|proj)|linear_fc1|linear_fc2)"
Edit = Callable[[Any], Any]


def moved(tower: Any) -> None:
    """As `module.to(there)` and back: other memory, and other buffers."""
    tower._apply(torch.clone)


def cast_and_back(tower: Any) -> None:
    tower.double().float()


def other_attention(tower: Any) -> None:
    tower.set_attn_implementation("eager" if tower.config._attn_implementation == "sdpa" else "sdpa")


@pytest.mark.parametrize("watch_data", [True, False])
@pytest.mark.parametrize("edit", [moved, cast_and_back, other_attention], ids=lambda edit: edit.__name__)
def test_no_weight_changes(edit: Edit, watch_data: bool) -> None:
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(watch_data=watch_data))
    for _ in range(8):
        assert_same(call.run(tower), expected)
        edit(tower)
    ran_fused(handle, calls=8)
    assert handle.stats()["refreshes"] == 1


@contextmanager
def hooked(tower: Any) -> Any:
    hook = tower.blocks[0].register_forward_hook(lambda *_: None)
    yield
    hook.remove()


@contextmanager
def patched(tower: Any) -> Any:
    tower.blocks[0].mlp.forward = lambda x: x
    yield
    del tower.blocks[0].mlp.forward


AWAY: list[Callable[[Any], AbstractContextManager[None]]] = [hooked, patched]


@pytest.mark.parametrize("away", AWAY, ids=lambda away: away.__name__)
def test_what_comes_and_goes(away: Any) -> None:
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    handle = fusedvit.fuse(tower)
    for _ in range(3):
        assert_same(call.run(tower), expected)
        with away(tower):
            assert_same(call.run(tower), expected_of(tower, call))
    assert_same(call.run(tower), expected)
    stats = handle.stats()
    assert (stats["fused"], sum(stats["original"].values()), stats["refreshes"]) == (4, 3, 1)


def added(tower: Any) -> None:
    with torch.no_grad():
        tower.merger.linear_fc2.bias.add_(0.5)


def one_element(tower: Any) -> None:
    """Which no fingerprint need read."""
    with torch.no_grad():
        tower.merger.linear_fc2.bias[3] += 4


def scaled_through_data(tower: Any) -> None:
    tower.blocks[0].attn.qkv.weight.data.mul_(3)


def replaced(tower: Any) -> None:
    fc2 = tower.merger.linear_fc2
    fc2.weight = nn.Parameter(fc2.weight.detach() * 2, requires_grad=False)


def exchanged(tower: Any) -> None:
    """The same objects under other names."""
    first, second = tower.blocks[0].norm1, tower.blocks[1].norm2
    first.weight, second.weight = second.weight, first.weight


def other_frequencies(tower: Any) -> None:
    tower.rotary_pos_emb.inv_freq = tower.rotary_pos_emb.inv_freq * 0.5


WRITES: list[Edit] = [added, one_element, scaled_through_data, replaced, exchanged, other_frequencies]


@pytest.mark.parametrize("away", [*AWAY, lambda _: pytest.MonkeyPatch.context()], ids=["hooked", "patched", "neither"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_written_meanwhile(write: Edit, away: Any) -> None:
    tower = tiny_tower()
    nn.init.normal_(tower.blocks[1].norm2.weight)
    call = Call.of(tower, GRIDS["mix"])
    fusedvit.fuse(tower)
    before = call.run(tower)
    with away(tower):
        call.run(tower)
        write(tower)
        other_attention(tower)
    ours = call.run(tower)
    assert_different(ours, before)
    assert_same(ours, expected_of(tower, call))


def test_an_adapter_of_another_scale() -> None:
    """No tensor changes, but what is folded."""
    tower = family_tower("Qwen3VLVisionModel")
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR), tower)
    for name, p in tower.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    tower.requires_grad_(False).eval()
    call = Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower)
    before = call.run(tower)
    with hooked(tower):
        call.run(tower)
        for module in tower.modules():
            if hasattr(module, "scaling") and isinstance(module.scaling, dict):
                module.scaling["default"] = 0.25
    ours = call.run(tower)
    assert_different(ours, before)
    assert_same(ours, expected_of(tower, call))
    assert handle.stats()["refreshes"] == 2


def test_parameters_that_count_no_version_are_prepared_again() -> None:
    """One element of one escapes fingerprints."""
    with torch.inference_mode():
        tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower)
    call.run(tower)
    moved_buffers = tower.rotary_pos_emb.inv_freq.clone()
    tower.rotary_pos_emb.inv_freq = moved_buffers
    assert_same(call.run(tower), expected_of(tower, call))
    assert handle.stats()["refreshes"] == 2


def test_refresh_prepares_whatever_fingerprints_say() -> None:
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower, BY_VERSIONS)
    call.run(tower)
    tower.merger.linear_fc2.bias.data[3] += 4
    handle.refresh()
    assert handle.stats()["refreshes"] == 2
    assert_same(call.run(tower), expected_of(tower, call))


@pytest.mark.parametrize("watch_data", [True, False])
def test_a_preparation_that_fails_on_the_way(watch_data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies were written for a tower that is gone again at the next call."""
    from fusedvit.model import prepare_weights

    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(watch_data=watch_data))
    call.run(tower)
    real, bias = prepare_weights.rewrite, tower.merger.linear_fc2.bias
    other = nn.Parameter(bias.detach() + 1, requires_grad=False)

    def failing(old: Any, new: Any) -> Any:
        real(old, new)
        raise MemoryError

    tower.merger.linear_fc2.bias = other
    with monkeypatch.context() as patch:
        patch.setattr(prepare_weights, "rewrite", failing)
        with pytest.raises(MemoryError):
            call.run(tower)
    tower.merger.linear_fc2.bias = bias
    assert_same(call.run(tower), expected)
    assert handle.stats()["refreshes"] == 2


def test_moved_buffers_are_no_replaced_parameters() -> None:
    """Parameters that count no version are prepared again, and the reason says why."""
    with torch.inference_mode():
        tower = tiny_tower()
    call = Call.of(tower, GRIDS["smallest"])
    handle = fusedvit.fuse(tower)
    for _ in range(MOST_PREPARING + 2):
        call.run(tower)
        tower.rotary_pos_emb.inv_freq = tower.rotary_pos_emb.inv_freq.clone()
    assert handle.stats()["original"].keys() == {fallback.CHANGED}


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_steps_of_an_optimizer_without_watch_data(kind: Any, options: dict[str, bool]) -> None:
    """`fused=True` counts no version."""
    tower = tiny_tower().requires_grad_(True)
    call = Call.of(tower, GRIDS["smallest"])
    handle = fusedvit.fuse(tower, BY_VERSIONS)
    before = call.run(tower)
    optimizer = kind(tower.parameters(), lr=0.05, **options)
    for _ in range(2):
        loss = tower(call.pixels, call.grid).pooler_output.pow(2).mean()
        assert_same(call.run(tower), before)  # between forward and step
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ours = call.run(tower)
        assert_different(ours, before)
        assert_same(ours, expected_of(tower, call))
        before = ours
    assert handle.stats()["original"] == {fallback.GRADIENTS: 2}
