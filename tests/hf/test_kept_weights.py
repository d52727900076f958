"""Prepared weights stay where no parameter changed, whatever else did; and go where one did meanwhile."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import peft
import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.calls.pauses import MOST_PREPARING
from fusedvit.checks import fallback
from fusedvit.kernels.fingerprint import GROUP
from fusedvit.kernels.reference.fingerprint import sampled_groups
from tests.support.families import family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_different,
    assert_same,
    expected_of,
    fused_and_original,
    fused_tower,
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
    tower, handle, call, original = fused_and_original(config=fusedvit.FuseConfig(watch_data=watch_data))
    expected = call.run(original)
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
    tower, handle, call, original = fused_and_original()
    expected = call.run(original)
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
    """Parameters that count no version are prepared again once; then all of their content is compared."""
    with torch.inference_mode():
        tower = tiny_tower()
    call = Call.of(tower, GRIDS["smallest"])
    handle = fusedvit.fuse(tower)
    for _ in range(MOST_PREPARING + 2):
        call.run(tower)
        tower.rotary_pos_emb.inv_freq = tower.rotary_pos_emb.inv_freq.clone()
    ran_fused(handle, calls=MOST_PREPARING + 2)
    assert handle.stats()["refreshes"] == 2
    with torch.inference_mode():
        tower.pos_embed.weight[-1, -1] += 4
    tower.rotary_pos_emb.inv_freq = tower.rotary_pos_emb.inv_freq.clone()
    assert_same(call.run(tower), expected_of(tower, call))


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


def load(tower: Any) -> None:
    tower.load_state_dict({name: t.clone() for name, t in tower.state_dict().items()})


def nothing_added(tower: Any) -> None:
    with torch.no_grad():
        tower.blocks[0].attn.qkv.weight.add_(0)


def load_and_switch_attention(tower: Any) -> None:
    load(tower)
    other_attention(tower)


SAME: list[Edit] = [load, nothing_added, load_and_switch_attention]


@pytest.mark.parametrize("watch_data", [True, False])
@pytest.mark.parametrize("write", SAME, ids=lambda write: write.__name__)
def test_the_same_values_written_before_each_call(write: Edit, watch_data: bool) -> None:
    """As a trainer's sync of a frozen tower."""
    tower, handle, call = fused_tower(grid=GRIDS["smallest"], config=fusedvit.FuseConfig(watch_data=watch_data))
    expected = call.run(tower)
    for _ in range(MOST_PREPARING + 4):
        write(tower)
        assert_same(call.run(tower), expected)
    ran_fused(handle, calls=MOST_PREPARING + 5)
    assert handle.stats()["refreshes"] == 2 and handle.reason() is None


def unread_element(weight: torch.Tensor) -> int:
    """The first element in fp32 that its fingerprint does not read."""
    groups = weight.numel() * 2 // GROUP
    return min({*range(groups)} - {*sampled_groups(groups).tolist()}) * GROUP // 2


@pytest.mark.parametrize("write", SAME, ids=lambda write: write.__name__)
def test_one_element_written_where_others_keep_their_values(write: Edit) -> None:
    """No fingerprint reads it; each time it is another, or what it was before."""
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["smallest"])
    handle, before = fusedvit.fuse(tower), call.run(tower)
    qkv = tower.blocks[0].attn.qkv.weight  # which is copied: its rows get another order
    for step in (9, 0, 0, 9, 0, 9, -9, 0, -9, 0, 0):
        write(tower)
        with torch.no_grad():
            qkv.view(-1)[unread_element(qkv)] += step
        ours = call.run(tower)
        assert_same(ours, expected_of(tower, call))
        if step:
            assert_different(ours, before)
        before = ours
    assert handle.stats()["original"] == {}


def test_whatever_else_changes_as_the_same_values_are_written() -> None:
    tower, handle, call = fused_tower()
    for _ in range(3):
        load(tower)
        expected = call.run(tower)
    for away, reason in ((hooked, fallback.HOOKS), (patched, fallback.MODIFIED)):
        load(tower)
        with away(tower):
            assert_same(call.run(tower), expected_of(tower, call))
        assert handle.stats()["original"].pop(reason) == 1, reason
    load(tower)
    assert_same(call.run(tower), expected)
    other_frequencies(tower)
    load(tower)
    assert_same(call.run(tower), expected_of(tower, call))


def adapted(**options: Any) -> Any:
    """A tower with an adapter `policy`, which is trained, and one that stays, `reference`."""
    torch.manual_seed(0)
    tower = tiny_tower()
    config = peft.LoraConfig(r=2, target_modules=r".*qkv", init_lora_weights=False)
    peft.inject_adapter_in_model(config, tower, "reference")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=LINEAR, **options), tower, "policy")
    return tower.eval()


def switch(tower: Any, *names: str, training: bool = False) -> None:
    for module in tower.modules():
        if hasattr(module, "lora_A"):
            module.enable_adapters(bool(names))
            module.set_adapter([*names])
    for name, p in tower.named_parameters():
        p.requires_grad_(training and ".policy" in name)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}, {"lora_dropout": 0.5}], ids=str)
@pytest.mark.parametrize("names", [(), ("reference",)], ids=["none", "reference"])
def test_a_reference_call_after_each_step_of_a_policy(names: tuple[str, ...], options: dict[str, Any]) -> None:
    """As DPO and PPO with PEFT: what the reference computes with never changes."""
    tower = adapted(**options)
    call = Call.of(tower, GRIDS["smallest"])
    handle = fusedvit.fuse(tower)
    optimizer = torch.optim.SGD([p for n, p in tower.named_parameters() if ".policy" in n], lr=1e-3)
    answers = []
    for _ in range(MOST_PREPARING + 2):
        switch(tower, "policy", training=True)
        tower(call.pixels, call.grid).pooler_output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        switch(tower, *names)
        answers.append(call.run(tower))
    assert_same(answers[0], expected_of(tower, call))
    for answer in answers[1:]:
        assert_same(answer, answers[0])
    stats = handle.stats()
    assert (stats["fused"], stats["refreshes"]) == (MOST_PREPARING + 2, 1)
    assert stats["original"] == {fallback.GRADIENTS: MOST_PREPARING + 2}
    switch(tower, "policy")
    assert_different(call.run(tower), answers[0])
    assert_same(call.run(tower), expected_of(tower, call))


def test_the_same_adapters_active_again_are_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT names them in other lists, which are compared from then on."""
    tower = adapted()
    switch(tower, "reference")
    call = Call.of(tower, GRIDS["smallest"])
    handle = fusedvit.fuse(tower)
    expected, version = call.run(tower), handle.weights.version
    monkeypatch.setattr(handle.weights, "prepare", None)
    for _ in range(3):
        switch(tower, "policy")
        switch(tower, "reference")
        assert_same(call.run(tower), expected)
    assert handle.weights.version == version
    monkeypatch.undo()
    for module in tower.modules():
        if hasattr(module, "lora_A"):
            module._active_adapter.append("policy")
    assert_same(call.run(tower), expected_of(tower, call))
    assert handle.weights.version == version + 1


def test_an_idle_adapter_that_wants_gradients() -> None:
    """A call that asks for gradients begins no replay, whichever adapter wants them: it takes the original code."""
    tower = adapted()
    switch(tower)
    handle = fusedvit.fuse(tower)
    Call.of(tower, GRIDS["smallest"]).run(tower)
    assert not handle.weights.trained()
    for name, p in tower.named_parameters():
        p.requires_grad_(".policy" in name)
    assert handle.weights.trained()


def counted(tower: Any) -> None:
    tower.seen.add_(1)


def counted_anew(tower: Any) -> None:
    tower.seen = tower.seen + 1


@pytest.mark.parametrize("inner", [False, True], ids=["tower", "inner"])
@pytest.mark.parametrize("count", [counted, counted_anew], ids=lambda count: count.__name__)
def test_a_buffer_that_no_code_reads(count: Edit, inner: bool) -> None:
    tower = tiny_tower()
    owner = tower.blocks[0].mlp if inner else tower
    owner.register_buffer("seen", torch.zeros(2**17))  # more than is read to be compared
    call = Call.of(tower, GRIDS["smallest"])
    handle = fusedvit.fuse(tower)
    expected = call.run(tower)
    for _ in range(MOST_PREPARING + 2):
        count(owner)
        other_attention(tower)
        assert_same(call.run(tower), expected)
    ran_fused(handle, calls=MOST_PREPARING + 3)
    assert handle.stats()["refreshes"] == 1
