"""Weights that change after `fuse`: never a stale answer, however they were changed (F12)."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.bench.towers import cast_parameters_
from fusedvit.checks.checked_tower import CheckedTower
from fusedvit.model.weights import EncoderWeights
from tests.support.towers import (
    GRIDS,
    Call,
    assert_bitwise,
    assert_different,
    assert_same,
    copy_of,
    fused_and_original,
    fused_tower,
    ran_fused,
    tiny_model,
    tiny_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-6, torch.float16: 0.005, torch.bfloat16: 0.04}
LORA = {"target_modules": r".*visual.*(qkv|linear_fc1|proj)", "r": 4, "lora_alpha": 32}


def like(p: torch.Tensor, i: int) -> torch.Tensor:
    """Other values of `p`'s scale."""
    generator = torch.Generator().manual_seed(100 + i)
    return (p.detach() * (1 + 0.3 * torch.randn(p.shape, generator=generator))).to(p.dtype)


def tiny_owner(tower: Any) -> Any:
    """A model that holds `tower`, for the changes below."""
    owner = nn.Module()
    owner.visual = tower
    return owner


def copy_under_no_grad(model: Any) -> None:
    with torch.no_grad():
        for i, p in enumerate(model.visual.parameters()):
            p.copy_(like(p, i))


def copy_into_data(model: Any) -> None:
    for i, p in enumerate(model.visual.parameters()):
        p.data.copy_(like(p, i))


def _other_state(model: Any) -> dict[str, torch.Tensor]:
    return {name: like(t, i) for i, (name, t) in enumerate(model.visual.state_dict().items())}


def load_state_dict(model: Any) -> None:
    model.visual.load_state_dict(_other_state(model), strict=True)


def load_state_dict_assigning(model: Any) -> None:
    model.visual.load_state_dict(_other_state(model), strict=True, assign=True)


def new_parameters(model: Any) -> None:
    for module in model.visual.modules():
        for i, (name, p) in enumerate(list(module._parameters.items())):
            if p is not None:
                setattr(module, name, nn.Parameter(like(p, i), requires_grad=False))


def assign_data(model: Any) -> None:
    for i, p in enumerate(model.visual.parameters()):
        p.data = like(p, i)


def optimizer_step(model: Any) -> None:
    parameters = list(model.visual.requires_grad_().parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for i, p in enumerate(parameters):
        p.grad = p.detach() - like(p, i)
    optimizer.step()
    model.visual.requires_grad_(False)


def halve(model: Any) -> None:
    model.half()


def to_float64(model: Any) -> None:
    model.to(torch.float64)


def _attach_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(**LORA))
    for i, (name, p) in enumerate(adapted.named_parameters()):
        if "lora_" in name:
            p.data.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return adapted.requires_grad_(False)


def lora_merged_without_a_call(model: Any) -> None:
    """Attached, merged and unloaded before the tower is called again: the same modules as before, other values."""
    _attach_lora(model).merge_and_unload()


def lora_called_then_merged(model: Any) -> None:
    adapted = _attach_lora(model)
    Call.of(model.visual, GRIDS["mix"]).run(model.visual)
    adapted.merge_and_unload()


CHANGES: list[Callable[[Any], None]] = [
    copy_under_no_grad,
    copy_into_data,
    load_state_dict,
    load_state_dict_assigning,
    new_parameters,
    assign_data,
    optimizer_step,
    halve,
    to_float64,
    lora_merged_without_a_call,
    lora_called_then_merged,
]


def expected_of(tower: Any, call: Call) -> dict[str, torch.Tensor]:
    """What a fresh original tower answers with the same weights."""
    c = tower.config
    other = tiny_tower(seed=9, depth=c.depth, deepstack_visual_indexes=c.deepstack_visual_indexes).to(tower.dtype)
    other.load_state_dict(tower.state_dict(), strict=True)
    return call.run(other)


@pytest.mark.parametrize("used_before", [True, False], ids=["used", "fresh"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_answer_after_a_change(change: Callable[[Any], None], used_before: bool) -> None:
    model = tiny_model().requires_grad_(False).model
    tower = model.visual
    call = Call.of(tower, GRIDS["mix"])
    before = call.run(tower)
    handle = fusedvit.fuse(model)
    if used_before:
        call.run(tower)
    change(model)
    for _ in range(2):  # the change, once noticed, must not be forgotten
        call = Call.of(tower, GRIDS["mix"])
        ours = call.run(tower)
        expected = expected_of(tower, call)
        assert_same(ours, expected, limit=LIMITS[tower.dtype])
    if change not in (halve, to_float64):
        assert_different(ours, before)
    stats = handle.stats()
    assert stats["original"] == {}
    assert stats["refreshes"] == 1 + used_before + (change is lora_called_then_merged)
    fusedvit.fuse(fusedvit.unfuse(model), STRICT)
    assert_bitwise(call.run(tower), ours)  # weights refreshed in place are those that a fresh fuse prepares


ONE_BLOCK = {"depth": 1, "deepstack_visual_indexes": [0]}  # each kind of parameter once


def _copied(p: nn.Parameter, seed: int) -> None:
    with torch.no_grad():
        p.copy_(like(p, seed))


def _assigned(p: nn.Parameter, seed: int) -> None:
    p.data = like(p, seed)


def _by_little(p: nn.Parameter, seed: int) -> None:
    """One step of a slow optimiser: every value changes, none by much."""
    p.data.mul_(1 + 2 * torch.finfo(p.dtype).eps)


def _rounded(p: nn.Parameter, seed: int) -> None:
    """A bf16 checkpoint in a wider dtype: the low bits of every value are 0, before and after."""
    p.data.copy_(like(p, seed).to(torch.bfloat16))


SMALL_WRITES = {
    _copied: [torch.float32],
    _assigned: [torch.float32],
    _by_little: [torch.float32, torch.float16, torch.bfloat16],
    _rounded: [torch.float32, torch.float64],
}


@pytest.mark.parametrize("write, dtype", [(w, d) for w, dtypes in SMALL_WRITES.items() for d in dtypes])
def test_small_writes(write: Callable[[nn.Parameter, int], None], dtype: torch.dtype) -> None:
    """To each parameter, one at a time."""
    even = {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 64} if write is _rounded else {}
    tower = tiny_tower(**ONE_BLOCK, **even)
    tower = copy_of(copy_of(tower, torch.bfloat16) if write is _rounded else tower, dtype)
    handle = fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, GRIDS["images"])
    call.run(tower)
    for i, (name, p) in enumerate(tower.named_parameters()):
        write(p, i)
        ours = call.run(tower)
        assert handle.stats()["refreshes"] == i + 2, f"a write to {name} went unnoticed"
    if dtype == torch.float32 and not even:
        assert_same(ours, expected_of(tower, call))


def test_nothing_is_refreshed_without_a_change() -> None:
    tower, handle, call = fused_tower(grid=GRIDS["images"], config=STRICT)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            tower(call.pixels, grid_thw=call.grid)
            tower.train().eval()
            tower.state_dict()
    assert handle.stats()["refreshes"] == 1


def test_unwatched_writes_need_refresh() -> None:
    tower, handle, call = fused_tower(config=fusedvit.FuseConfig(watch_data=False, strict=True))
    before = call.run(tower)
    for i, p in enumerate(tower.parameters()):
        p.data.copy_(like(p, i))
    assert handle.stats()["refreshes"] == 1
    handle.refresh()
    assert handle.stats()["refreshes"] == 2
    ours = call.run(tower)
    assert_different(ours, before)
    assert_same(ours, expected_of(tower, call))
    copy_under_no_grad(tiny_owner(tower))  # what has a version is noticed all the same
    assert_same(call.run(tower), expected_of(tower, call))
    ran_fused(handle, calls=3)


def test_unwatched_buffers_have_versions_too() -> None:
    tower, _, call, original = fused_and_original(config=fusedvit.FuseConfig(watch_data=False))
    before = call.run(tower)
    for here in (tower, original):
        here.rotary_pos_emb.inv_freq.mul_(1.5)
    ours = call.run(tower)
    assert_different(ours, before)
    assert_same(ours, call.run(original))


@pytest.mark.parametrize("versioned", [True, False], ids=["copy_", "data.copy_"])
def test_threads_after_a_change(versioned: bool) -> None:
    """Several threads notice a change at once: none of them may answer by what it began with."""
    tower, handle, call = fused_tower(config=STRICT)
    call.run(tower)
    first = [p.detach().clone() for p in tower.parameters()]
    with ThreadPoolExecutor(4) as pool:
        for k in range(25):
            for i, (p, values) in enumerate(zip(tower.parameters(), first, strict=True)):
                with torch.no_grad():
                    (p if versioned else p.data).copy_(like(values, 1000 * k + i))
            expected = expected_of(tower, call)
            for answer in pool.map(lambda _: call.run(tower), range(8)):
                assert_same(answer, expected)
    ran_fused(handle, calls=1 + 25 * 8)


def move(model: Any) -> None:
    for p in model.visual.parameters():
        p.data = p.data.clone()


@pytest.mark.parametrize("write", [copy_under_no_grad, copy_into_data, assign_data, move])
def test_a_write_while_weights_are_prepared(write: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's, after the parameters were read: the next call notices, and can follow where they move."""
    tower = tiny_tower(**ONE_BLOCK)
    owner, call = tiny_owner(tower), Call.of(tower, GRIDS["mix"])
    handle, writes = fusedvit.fuse(tower, STRICT), [write]
    real = CheckedTower.prepare

    def prepare(self: CheckedTower, *arguments: Any) -> EncoderWeights:
        found = real(self, *arguments)
        for other in writes:
            other(owner)
        writes.clear()
        return found

    monkeypatch.setattr(CheckedTower, "prepare", prepare)
    handle.refresh()
    for _ in range(2):
        assert_same(call.run(tower), expected_of(tower, call))
        move(owner)


def test_held_outputs_survive_a_refresh() -> None:
    tower, _, call = fused_tower(config=STRICT)
    held = call.run(tower)
    then = {name: t.clone() for name, t in held.items()}
    copy_under_no_grad(tiny_owner(tower))
    call.run(tower)
    assert_bitwise(held, then)


def test_parameters_made_in_inference_mode_and_cast() -> None:
    """They are no inference tensors any more, and have no version all the same."""
    tower = tiny_tower()
    with torch.inference_mode():
        new_parameters(tiny_owner(tower))
    tower.double()
    original, handle = copy_of(tower), fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, GRIDS["mix"])
    assert_same(call.run(tower), call.run(original))
    copy_into_data(tiny_owner(tower))
    copy_into_data(tiny_owner(original))
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["refreshes"] == 2


def one_in_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[3, 7] += 300


def one_by_dlpack(weight: torch.Tensor) -> None:
    torch.from_dlpack(weight.detach())[3, 7] += 300


def one_in_shared_memory(weight: torch.Tensor) -> None:
    other = torch.empty(0, dtype=weight.dtype).set_(weight.share_memory_().untyped_storage(), 0, weight.shape)
    other[3, 7] += 300


def one_in_place(weight: torch.Tensor) -> None:
    with torch.inference_mode():
        weight[3, 7] += 300


@pytest.mark.parametrize("write", [one_in_numpy, one_by_dlpack, one_in_shared_memory, one_in_place])
def test_refresh_takes_a_write_that_counts_no_version(write: Callable[[torch.Tensor], None]) -> None:
    """docs/using.md: to one element, it may be none of those that the fingerprint reads."""
    tower = tiny_tower()
    if write is one_in_place:
        with torch.inference_mode():
            new_parameters(tiny_owner(tower))
    handle = fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, GRIDS["mix"])
    before = call.run(tower)
    write(tower.blocks[0].mlp.linear_fc1.weight)
    handle.refresh()
    ours = call.run(tower)
    assert_different(ours, before)
    assert_same(ours, expected_of(tower, call))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda tower: pickle.loads(pickle.dumps(tower))])
def test_copies_take_the_frequencies_that_casting_has_rounded(copied: Callable[[Any], Any]) -> None:
    """The record of a copy's family is a copy too, and says the same."""
    tower = tiny_tower()
    fusedvit.fuse(tower, STRICT)
    other = copied(tower).bfloat16().float()
    call = Call.of(other, GRIDS["mix"])
    assert_same(call.run(other), call.run(fusedvit.unfuse(other)))


def test_parameters_are_not_changed_by_us() -> None:
    tower = tiny_tower()
    before = {name: (p.data_ptr(), p.detach().clone(), p._version) for name, p in tower.named_parameters()}
    handle = fusedvit.fuse(tower, STRICT)
    Call.of(tower, GRIDS["mix"]).run(tower)
    handle.refresh()
    for name, p in tower.named_parameters():
        pointer, values, version = before[name]
        assert (p.data_ptr(), p._version) == (pointer, version) and p.equal(values), name


def hook_a_block(tower: Any) -> None:
    tower.blocks[0].register_forward_hook(lambda *_: None)


def drop_a_block(tower: Any) -> None:
    del tower.blocks[-1]


@pytest.mark.parametrize("and_then", [None, hook_a_block, drop_a_block])
def test_moved_weights_are_let_go(and_then: Callable[[Any], None] | None) -> None:
    """Once the tower has run with other parameters, fused or not, nothing keeps the old ones' memory."""
    tower, handle, call = fused_tower(grid=GRIDS["images"])
    call.run(tower)
    old = [weakref.ref(p) for p in tower.parameters()]
    new_parameters(tiny_owner(tower))
    if and_then is not None:
        and_then(tower)
    call.run(tower)
    gc.collect()
    assert {p() for p in old} == {None}
    assert handle.stats()["fused"] == (2 if and_then is None else 1)


def test_a_run_that_begins_while_weights_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What began with the old ones is not accepted, whichever version it read."""
    tower = tiny_tower(**ONE_BLOCK)
    weights = fusedvit.fuse(tower, STRICT).weights
    Call.of(tower, GRIDS["smallest"]).run(tower)
    began: list[tuple[int, EncoderWeights]] = []

    def pointers(self: EncoderWeights) -> tuple[int, ...]:  # asked while weights are prepared: as another thread then
        began.append((weights.version, weights.get()))
        return real(self)

    real = EncoderWeights.pointers
    monkeypatch.setattr(EncoderWeights, "pointers", pointers)
    load_state_dict_assigning(tiny_owner(tower))
    assert weights.prepare() is None
    version, found = began[-1]
    assert found is not weights.get()
    assert weights.read_back(None, True, None).unchanged and weights.version != version


def test_memory_is_reported() -> None:
    """Folded copies: qkv, fc1 and the deepstack mergers' fc1; what needed a wider pitch, and vectors, are held as well.

    The MLP's 70 channels are held as 72, which fill 16 bytes.
    """
    tower = tiny_tower()
    cast_parameters_(tower, torch.bfloat16)  # in fp32 norms do not fold
    handle = fusedvit.fuse(tower, STRICT)
    Call.of(tower, GRIDS["images"]).run(tower)
    c, inner, merged, depth, deepstack = 48, 72, 192, 3, 2
    folded = depth * (3 * c * c + inner * c) + deepstack * merged * merged
    vectors = 2 * (depth * (3 * c + inner) + deepstack * merged)
    padded = depth * c * inner  # fc2
    out = 40
    biases = c + depth * 2 * c + (2 * c + merged + out) + deepstack * out  # patch, proj and fc2, merger, deepstack fc2
    held = 2 * (folded + padded + biases) + 4 * (vectors + c // 2 // 4)
    assert handle.stats()["weights_mib"] == pytest.approx(held / 2**20, rel=1e-3)
