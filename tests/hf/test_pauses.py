"""Calls that prepared weights in vain: the next ones run the original code at once, and try again later."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedvit
from fusedvit.calls.attempts import MOST_REPEATS, MOST_RUNS, OVERTAKEN
from fusedvit.calls.pauses import AS_MUCH_AS, FIRST, MOST, MOST_PREPARING, Pause
from fusedvit.checks import fallback
from fusedvit.errors import Reason
from tests.hf.test_weights import like
from tests.support.towers import (
    GRIDS,
    Call,
    assert_bitwise,
    assert_same,
    expected_of,
    fused_and_original,
    fused_tower,
    ran_fused,
    tiny_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)
Replace = Callable[[Any], None]


def test_a_pause_doubles_up_to_a_limit_and_ends() -> None:
    pause, why, lengths = Pause(), Reason(fallback.CHANGED_DURING_CALL), []
    assert pause.skip_call() is None and not pause.again
    for _ in range(10):
        pause.begin(why)
        assert pause.again
        count = 0
        while pause.skip_call() is why:
            count += 1
        lengths.append(count)
    assert lengths[:3] == [FIRST, 2 * FIRST, 4 * FIRST] and lengths[-2:] == [MOST, MOST]
    pause.begin(why)
    pause.end()
    assert pause.skip_call() is None and not pause.again


def test_calls_that_prepare_are_counted_in_a_row() -> None:
    pause, changes = Pause(), itertools.count(1)

    def prepare() -> bool:
        now = next(changes)
        found = pause.prepares(now)
        assert not pause.prepares(now), "a call of another thread that waited for the same preparation"
        return found

    assert [prepare() for _ in range(MOST_PREPARING)] == [False] * (MOST_PREPARING - 1) + [True]
    pause.end()
    for _ in range(5):  # as many prepare as one call makes up for
        assert not any(prepare() for _ in range(AS_MUCH_AS))
        pause.holds()
    assert any([prepare() for _ in range(MOST_PREPARING) for _ in (pause.holds(), *range(AS_MUCH_AS + 1))]), (
        "nearly every call"
    )


def test_one_change_after_a_pause_begins_no_other() -> None:
    pause, changes = Pause(), itertools.count(1)
    for _ in range(10 * MOST_PREPARING):
        if pause.prepares(next(changes)):
            pause.begin(Reason(fallback.CHANGED_BETWEEN_CALLS))
        while pause.skip_call() is not None:
            pass
    pause.begin(Reason(fallback.CHANGED_DURING_CALL))
    assert not pause.prepares(next(changes)) and pause.prepares(next(changes))
    for _ in range(MOST_PREPARING // AS_MUCH_AS):
        pause.holds()
    assert not any(pause.prepares(next(changes)) for _ in range(MOST_PREPARING - 1)), "old changes are forgotten"


def test_a_change_that_many_threads_meet_is_one() -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    call.run(tower)
    for _ in range(3):
        add(tower)
        expected = expected_of(tower, call)
        with ThreadPoolExecutor(3 * MOST_PREPARING) as threads:
            for found in threads.map(lambda _: call.run(tower), range(3 * MOST_PREPARING)):
                assert_same(found, expected)
    ran_fused(handle, calls=1 + 9 * MOST_PREPARING)


def written_during_each_run(handle: Any, tower: Any, write: Callable[[Any], None]) -> Callable[[], None]:
    """Writes weights during every run on them; returns what ends it."""
    real = handle.weights.read_back

    def after_a_write(*arguments: Any) -> Any:
        write(tower)
        return real(*arguments)

    handle.weights.read_back = after_a_write

    def stop() -> None:
        del handle.weights.read_back

    return stop


def add(tower: Any) -> None:
    with torch.no_grad():
        tower.merger.linear_fc2.bias.add_(0.125)


def add_through_data(tower: Any) -> None:
    tower.blocks[0].attn.qkv.weight.data.mul_(1.01)


def assign(tower: Any) -> None:
    tower.blocks[1].norm1.weight = nn.Parameter(tower.blocks[1].norm1.weight.detach() * 1.01, requires_grad=False)


@pytest.mark.parametrize("write", [add, add_through_data, assign], ids=lambda write: write.__name__)
def test_weights_written_during_every_run_are_not_prepared_again_and_again(write: Callable[[Any], None]) -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    stop = written_during_each_run(handle, tower, write)
    for _ in range(1 + FIRST + 1 + 2 * FIRST):
        found = call.run(tower)
        assert_bitwise(found, expected_of(tower, call))
    stats = handle.stats()
    assert stats["original"] == {fallback.CHANGED_DURING_CALL: stats["calls"]} and stats["fused"] == 0
    assert stats["refreshes"] <= 1 + OVERTAKEN + MOST_RUNS + 3
    stop()
    call.run(tower)  # prepares
    call.run(tower)  # and is found as it was left
    assert handle.stats()["fused"] == 2
    for _ in range(3):  # a change between calls is nothing to pause for
        write(tower)
        assert_same(call.run(tower), expected_of(tower, call))
    assert handle.stats()["fused"] == 5
    written_during_each_run(handle, tower, write)
    before = handle.stats()["refreshes"]
    call.run(tower)
    assert handle.stats()["refreshes"] >= before + OVERTAKEN + MOST_RUNS, "the pause is over: a call tries in full"


@pytest.mark.parametrize("act", ["refresh", "warmup", "reconfigure", "release"])
def test_what_ends_a_pause(act: str) -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    stop = written_during_each_run(handle, tower, add)
    call.run(tower)
    stop()
    call.run(tower)
    assert handle.stats()["fused"] == 0
    handle.reconfigure(fusedvit.FuseConfig(graphs=False)) if act == "reconfigure" else getattr(handle, act)()
    assert_same(call.run(tower), expected_of(tower, call))
    assert handle.stats()["fused"] == 1


def test_strict_pauses_for_nothing() -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"], config=STRICT)
    stop = written_during_each_run(handle, tower, add)
    with pytest.raises(RuntimeError, match=fallback.CHANGED_DURING_CALL):
        call.run(tower)
    stop()
    for _ in range(2 * MOST_REPEATS):
        replace_all(tower)
        assert_same(call.run(tower), expected_of(tower, call))
    assert handle.stats()["fused"] == 2 * MOST_REPEATS


def replace_all(tower: Any) -> None:
    for module in tower.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(p.detach().clone(), requires_grad=False)


def replace_one(tower: Any) -> None:
    bias = tower.merger.linear_fc2.bias
    tower.merger.linear_fc2.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)


def load_assigned(tower: Any) -> None:
    tower.load_state_dict({name: t.clone() for name, t in tower.state_dict().items()}, assign=True)
    tower.requires_grad_(False)


REPLACES = [replace_all, replace_one, load_assigned]


@pytest.mark.parametrize("replace", REPLACES, ids=lambda replace: replace.__name__)
def test_equal_parameters_at_each_call(replace: Replace, caplog: pytest.LogCaptureFixture) -> None:
    tower, handle, call, original = fused_and_original()
    expected = call.run(original)
    for i in range(1 + MOST_REPEATS + FIRST):
        assert_same(call.run(tower), expected)
        assert handle.stats()["fused"] == min(i + 1, 1 + MOST_REPEATS)
        replace(tower)
    stats = handle.stats()
    assert stats["refreshes"] == 1 + MOST_REPEATS and stats["original"] == {fallback.REPLACED_BETWEEN_CALLS: FIRST}
    assert stats["weights_mib"] == 0 and handle.reason() is None
    assert [fallback.REPLACED_BETWEEN_CALLS in r.getMessage() for r in caplog.records if r.name == "fusedvit"] == [True]
    for i, p in enumerate(tower.parameters()):  # what the next calls take is what is there by then
        p.data.copy_(like(p, i))
    for _ in range(2 + 2 * FIRST):
        assert_same(call.run(tower), expected_of(tower, call))
        replace(tower)
    assert handle.stats()["original"] == {fallback.REPLACED_BETWEEN_CALLS: FIRST + 2 * FIRST}
    call.run(tower)
    before = handle.stats()["fused"]
    for _ in range(2):  # nobody replaces them any more
        assert_same(call.run(tower), expected_of(tower, call))
    assert handle.stats()["fused"] == before + 2


@pytest.mark.parametrize("replace", REPLACES, ids=lambda replace: replace.__name__)
def test_other_values_between_a_few_calls_run_fused(replace: Replace) -> None:
    """An evaluation after each step of a training."""
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    for i in range(3 * MOST_PREPARING):
        replace(tower)
        tower.merger.linear_fc2.bias.data.add_(0.1 * (i + 1))
        call.run(tower)
        assert_same(call.run(tower), expected_of(tower, call))
    ran_fused(handle, calls=6 * MOST_PREPARING)


def replace_with_others(tower: Any) -> None:
    replace_all(tower)
    add_through_data(tower)


@pytest.mark.parametrize(
    "write", [add, add_through_data, assign, replace_with_others], ids=lambda write: write.__name__
)
def test_other_values_at_each_call(write: Callable[[Any], None]) -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    for _ in range(MOST_PREPARING + FIRST + 2 + FIRST):
        assert_same(call.run(tower), expected_of(tower, call))
        write(tower)
    stats = handle.stats()
    assert (stats["fused"], stats["refreshes"]) == (MOST_PREPARING + 2, MOST_PREPARING + 2)
    assert stats["original"] == {fallback.CHANGED_BETWEEN_CALLS: 2 * FIRST} and "paused" in stats["state"]
    for _ in range(FIRST + 4 * FIRST):  # nobody writes any more: the pause that has begun is the last
        assert_same(call.run(tower), expected_of(tower, call))
    stats = handle.stats()
    assert (stats["fused"], stats["refreshes"]) == (MOST_PREPARING + 2 + 4 * FIRST, MOST_PREPARING + 3)
    assert stats["original"] == {fallback.CHANGED_BETWEEN_CALLS: 3 * FIRST}


def test_an_adapter_that_is_switched_on_and_off_in_turn() -> None:
    """A policy and its reference."""
    tower = tiny_tower()
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=r".*qkv", init_lora_weights=False), tower)
    tower.requires_grad_(False).eval()
    layers = [m for m in tower.modules() if hasattr(m, "lora_A")]
    call = Call.of(tower, GRIDS["smallest"])
    handle = fusedvit.fuse(tower)
    for i in range(MOST_PREPARING + 3 * FIRST):
        for layer in layers:
            layer.enable_adapters(i % 2 == 0)
        tower.requires_grad_(False)
        assert_same(call.run(tower), expected_of(tower, call))
    assert handle.stats()["refreshes"] == MOST_PREPARING + 2
    assert handle.stats()["original"].keys() == {fallback.CHANGED_BETWEEN_CALLS}


def test_training_under_a_reentrant_checkpoint() -> None:
    """Its forward asks for no gradients, its recomputation does."""
    tower = tiny_tower().requires_grad_(True)
    call, marker = Call.of(tower, GRIDS["smallest"]), torch.zeros(1, requires_grad=True)
    handle = fusedvit.fuse(tower)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    for _ in range(MOST_PREPARING + FIRST):
        out = checkpoint(
            lambda p, g, m: tower(p, g).pooler_output + m, call.pixels, call.grid, marker, use_reentrant=True
        )
        out.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    original = handle.stats()["original"]
    assert original == {fallback.GRADIENTS: MOST_PREPARING + FIRST, fallback.CHANGED_BETWEEN_CALLS: FIRST}
    assert handle.stats()["refreshes"] == MOST_PREPARING


@pytest.mark.parametrize("ask", ["refresh", "outdate", "release"])
def test_weights_that_somebody_asks_for_are_no_reason(ask: str) -> None:
    """As an engine does that loads weights, and whoever wants the memory between calls."""
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    for _ in range(3 * MOST_PREPARING):
        add(tower)
        getattr(handle.weights if ask == "outdate" else handle, ask)()
        assert_same(call.run(tower), expected_of(tower, call))
    ran_fused(handle, calls=3 * MOST_PREPARING)


@pytest.mark.parametrize("write", [add, replace_all], ids=lambda write: write.__name__)
def test_a_handle_says_that_its_tower_pauses(write: Callable[[Any], None]) -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    for _ in range(MOST_PREPARING if write is add else 1 + MOST_REPEATS):
        assert handle.reason() is None and handle.stats()["state"] == "fused"
        call.run(tower)
        write(tower)
    kind = fallback.CHANGED_BETWEEN_CALLS if write is add else fallback.REPLACED_BETWEEN_CALLS
    for left in range(FIRST, 0, -1):
        reason, text = handle.reason(), f"paused for {left} more call{'s' * (left > 1)}, or until refresh()"
        assert reason is not None and reason.kind == kind and text in reason.detail
        for said in (repr(handle), handle.report().splitlines()[0], handle.stats()["state"]):
            assert str(reason) in said and "fused on" not in said and "runs fused" not in said
        assert handle.stats()["state"].startswith("paused: ") and handle.state() == "fused"
        call.run(tower)
        assert handle.stats()["details"][kind] in reason.detail
    assert handle.reason() is None and "runs fused" in repr(handle)
    call.run(tower)
    write(tower)
    call.run(tower)
    assert "paused" in handle.stats()["state"]
    handle.refresh()
    assert handle.reason() is None and handle.stats()["state"] == "fused"
    assert_same(call.run(tower), expected_of(tower, call))
    fusedvit.unfuse(tower)
    assert handle.stats()["state"] == "unfused"


def test_equal_parameters_now_and_then_run_fused() -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    for _ in range(3 * MOST_REPEATS):
        replace_all(tower)
        call.run(tower)
        call.run(tower)
    ran_fused(handle, calls=6 * MOST_REPEATS)


def test_tower_that_accelerate_offloads_as_one() -> None:
    from accelerate import cpu_offload

    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    handle = fusedvit.fuse(tower)
    owner = nn.Module()
    owner.visual = tower
    owner.forward = lambda *args, **kwargs: owner.visual(*args, **kwargs)  # type: ignore[method-assign]
    cpu_offload(owner, execution_device="cpu", preload_module_classes=[type(tower).__name__])
    for _ in range(MOST_REPEATS + 1 + FIRST):
        assert_same(call.run(tower), expected)
    assert handle.stats()["original"].get(fallback.REPLACED_BETWEEN_CALLS, 0) >= FIRST - 1
