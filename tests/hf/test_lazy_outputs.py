"""Hidden states that were asked for: the call runs fused, and the original code computes them when they are read."""

import contextlib
import copy
import functools
import gc
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusedvit
from fusedvit.fused_encoder import FusedEncoder
from tests.support.families import INSTALLED, each_of, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_same,
    copy_of,
    error_of,
    fused_and_original,
    fused_tower,
    outputs_of,
    ran_fused,
    tiny_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)
HIDDEN = "hidden_states"


def pair() -> tuple[Any, Any]:
    """A fused tower and its original."""
    tower = tiny_tower()
    original = copy_of(tower)
    fusedvit.fuse(tower, STRICT)
    return tower, original


unchanged_pair = functools.cache(pair)  # for tests that change records alone


def asked(grid: Any = None, towers: Any = None, **arguments: Any) -> tuple[Any, Any, Any, Call]:
    """Our record, Hugging Face's, the fused tower and the call."""
    tower, original = towers or pair()
    call = Call.of(tower, grid or GRIDS["mix"])
    arguments = {"output_hidden_states": True} | arguments
    with torch.no_grad():
        ref = original(call.pixels, grid_thw=call.grid, **arguments)
        ours = tower(call.pixels, grid_thw=call.grid, **arguments)
    return ours, ref, tower, call


def assert_record(ours: Any, ref: Any) -> None:
    assert_same(outputs_of(ours), outputs_of(ref))
    assert type(getattr(ours, HIDDEN, None)) is type(getattr(ref, HIDDEN, None))
    assert type(ours) is type(ref) and list(ours.keys()) == list(ref.keys())


def test_reading_those_of_one_call_leaves_another_s_readable() -> None:
    """transformers marks a tower the first time that its hidden states are computed."""
    first, ref, tower, call = asked()
    second = call.record(tower, output_hidden_states=True)
    for record in (first, second):
        assert_record(record, ref)


def test_a_hook_that_comes_after_asking_is_not_captured() -> None:
    """transformers captures before hooks that are registered later, whether or not the states were read."""
    towers = pair()
    fusedvit.fuse(towers[0], fusedvit.FuseConfig())
    asked(towers=towers)
    for tower in towers:
        tower.blocks[0].register_forward_hook(lambda module, args, output: output * 1.5)
    ours, ref, *_ = asked(towers=towers)
    assert_record(ours, ref)


READ: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda r: r.hidden_states,
    "key": lambda r: r[HIDDEN],
    "get": lambda r: r.get(HIDDEN),
    "last index": lambda r: r[-1],
    "index": lambda r: r[len(r) - 1],
    "slice": lambda r: r[1:][-1],
    "to_tuple": lambda r: r.to_tuple()[-1],
    "values": lambda r: list(r.values())[-1],
    "items": lambda r: dict(r.items())[HIDDEN],
    "dict": lambda r: dict(r)[HIDDEN],
    "keywords": lambda r: (lambda **kw: kw[HIDDEN])(**r),
    "merged": lambda r: {**r}[HIDDEN],
    "copy": lambda r: copy.copy(r).hidden_states,
    "copy method": lambda r: r.copy()[HIDDEN],
    "deepcopy": lambda r: copy.deepcopy(r).hidden_states,
    "pickle": lambda r: pickle.loads(pickle.dumps(r)).hidden_states,
    "getattr": lambda r: getattr(r, HIDDEN, None),
    "pytree": lambda r: torch.utils._pytree.tree_map(lambda x: x, r).hidden_states,
    "leaves": lambda r: torch.utils._pytree.tree_leaves(r)[-4:],
    "vars": lambda r: vars(r)[HIDDEN],
    "rebuilt": lambda r: type(r)(**r).hidden_states,
    "rebuilt from a dictionary": lambda r: type(r)(dict(r.items())).hidden_states,
}


@pytest.mark.parametrize("name", READ)
def test_ways_to_read(name: str) -> None:
    ours, ref, _, _ = asked(towers=unchanged_pair())
    assert isinstance(ours, type(ref)) and HIDDEN in ours and len(ours) == len(ref)
    found, expected = READ[name](ours), READ[name](ref)
    assert len(found) == len(expected) > 1
    for a, b in zip(found, expected, strict=True):
        assert error_of(a, b) < 1e-5
    assert_record(ours, ref)


UNREAD: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda r: r.pooler_output,
    "key": lambda r: r["pooler_output"],
    "get": lambda r: r.get("last_hidden_state"),
    "get nothing": lambda r: r.get("nothing", 3),
    "index": lambda r: r[0],
    "slice": lambda r: r[:2],
    "keys": lambda r: list(r),
    "length": len,
    "in": lambda r: HIDDEN in r,
    "repr": repr,
    "vars": vars,
    "other field assigned": lambda r: setattr(r, "pooler_output", (r.pooler_output,)),
    "other key assigned": lambda r: r.__setitem__("pooler_output", (r.pooler_output,)),
}


@pytest.mark.parametrize("name", UNREAD)
def test_other_fields_compute_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, ref, tower, _ = asked(towers=unchanged_pair())
    runs: list[int] = []
    block = type(tower.blocks[0])
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda *a, **k: runs.append(1) or forward(*a, **k))
    UNREAD[name](ours)
    assert not runs
    monkeypatch.undo()
    UNREAD[name](ref)
    _ = ours.hidden_states
    assert [type(v) for v in ours.to_tuple()] == [type(v) for v in ref.to_tuple()]


def test_nothing_is_computed_twice() -> None:
    ours, _, _, _ = asked()
    assert ours.hidden_states is ours[HIDDEN] is ours[-1]
    assert ours.hidden_states[-1] is ours.last_hidden_state


def test_assigned_hidden_states_are_kept() -> None:
    for assign in (lambda r: setattr(r, HIDDEN, (1, 2)), lambda r: r.__setitem__(HIDDEN, (1, 2))):
        ours, ref, _, _ = asked()
        assign(ours)
        assert ours.hidden_states == ours[HIDDEN] == ours[-1] == (1, 2) and type(ours) is type(ref)


@each_of(INSTALLED)
def test_every_family(name: str) -> None:
    tower, handle, call, original = fused_and_original(family_tower(name), [(1, 4, 6), (1, 2, 2)], STRICT)
    arguments: list[dict[str, Any]] = [{}, {"output_hidden_states": True}]
    if "router_logits" in tower._can_record_outputs:
        arguments.append({"output_router_logits": True, "output_hidden_states": True})
    for given in arguments:
        with torch.no_grad():
            ours, ref = (call.record(m, **given) for m in (tower, original))
        assert list(ours.keys()) == list(ref.keys())
        assert_record(ours, ref)
    ran_fused(handle, len(arguments))


@pytest.mark.parametrize("selection", [-1, 1, [0, 2], [-1, 1]])
def test_selected_hidden_states(selection: Any) -> None:
    tower = tiny_tower()
    tower.config.num_hidden_layers = tower.config.depth  # what Hugging Face resolves negative indices with
    original, call = copy_of(tower), Call.of(tower, GRIDS["video"])
    fusedvit.fuse(tower, STRICT)
    with torch.no_grad():
        ours, ref = (m(call.pixels, grid_thw=call.grid, output_hidden_states=selection) for m in (tower, original))
    assert [h is None for h in ours.hidden_states] == [h is None for h in ref.hidden_states]


def test_option_of_the_config() -> None:
    tower = tiny_tower()
    tower.config.output_hidden_states = True
    original, call = copy_of(tower), Call.of(tower, GRIDS["video"])
    handle = fusedvit.fuse(tower, STRICT)
    with torch.no_grad():
        ours, ref = (m(call.pixels, grid_thw=call.grid) for m in (tower, original))
        tower.config.output_hidden_states = False  # what counts is when they were asked for
        assert_record(ours, ref)
        assert tower(call.pixels, grid_thw=call.grid).hidden_states is None
    ran_fused(handle, calls=2)


def test_a_selection_that_the_caller_edits() -> None:
    """What counts is the selection of the call, whichever object it came in."""
    for make in (lambda: [0], lambda: [0, 1], lambda: {0, 1}):
        selection: Any = make()
        ours, ref, _, _ = asked(output_hidden_states=selection)
        selection.clear()
        assert [h is None for h in ours.hidden_states] == [h is None for h in ref.hidden_states]


def test_a_selection_of_the_config_that_is_edited() -> None:
    tower, original = pair()
    for t in (tower, original):
        vars(t.config)["output_hidden_states"] = [0]  # older transformers takes no list by assignment
    ours, ref, tower, _ = asked(towers=(tower, original), output_hidden_states=tower.config.output_hidden_states)
    tower.config.output_hidden_states[0] = 1
    assert [h is None for h in ours.hidden_states] == [h is None for h in ref.hidden_states]


CONFIGURED: dict[str, tuple[Any, Callable[[Any], Any], bool]] = {
    "depth": ([-1], lambda c: setattr(c, "depth", 1), True),
    "depth, one index": (-1, lambda c: setattr(c, "depth", 1), True),
    "depth, nothing selected": (True, lambda c: setattr(c, "depth", 1), False),
    "what the last one is": (True, lambda c: setattr(c, "tie_last_hidden_states", False), True),
    "what nothing reads": (True, lambda c: setattr(c, "nothing", 1), False),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_what_transformers_reads_of_the_config_to_record(name: str) -> None:
    """Reading gives what the call would have given, or says that it cannot any more."""
    selection, change, told = CONFIGURED[name]
    resolves = hasattr(pytest.importorskip("transformers.utils.output_capturing"), "resolve_hidden_states_indices")
    told = told and (selection is True or resolves)  # older releases record all, whatever is selected
    ours, ref, tower, _ = asked(output_hidden_states=selection)
    change(tower.config)
    if told:
        with pytest.raises(RuntimeError, match=r"the tower has changed \(its config's \w+ is \w+ and was \w+\)"):
            _ = ours.hidden_states
    else:
        for a, b in zip(ours.hidden_states, ref.hidden_states, strict=True):
            assert (a is None) is (b is None) and (b is None or error_of(a, b) < 1e-5)


def test_transformers_reads_no_more_of_the_config_to_record() -> None:
    """Else `outputs._options_of_capturing` must compare that, too."""
    code = inspect.getsource(pytest.importorskip("transformers.utils.output_capturing"))
    read = set(re.findall(r"getattr\(\w+\.config, f?\"?([\w{}]+)\"?", code))
    assert read <= {"return_dict", "output_{k}", "output_attentions", "tie_last_hidden_states", "num_hidden_layers_key"}
    assert not re.findall(r"[^`]\b(?:self|model)\.config\.(\w+)", code)


CHANGES: dict[str, Callable[[Any, Call], Any]] = {
    "pixels": lambda t, c: c.pixels.add_(1),
    "pixels past their version": lambda t, c: c.pixels.data.mul_(1.1),
    "pixels through numpy": lambda t, c: c.pixels.numpy().__imul__(1.1),
    "one pixel": lambda t, c: c.pixels.data[3].add_(1e-3),
    "pixels permuted": lambda t, c: c.pixels.data.copy_(c.pixels.flip(0)),
    "grid": lambda t, c: c.grid.data[0].copy_(torch.tensor([1, 4, 8])),
    "weight": lambda t, c: t.blocks[1].attn.qkv.weight.mul_(1.01),
    "weight past its version": lambda t, c: t.blocks[1].mlp.linear_fc1.weight.data.mul_(1.01),
    "weight replaced": lambda t, c: setattr(t.merger.linear_fc2, "weight", torch.nn.Parameter(torch.zeros(40, 192))),
    "block replaced": lambda t, c: t.blocks.__setitem__(0, copy.deepcopy(t.blocks[0])),
    "weight, and a call since": lambda t, c: (t.blocks[0].norm1.weight.mul_(1.01), t(c.pixels, grid_thw=c.grid)),
    "weight, after unfuse": lambda t, c: (fusedvit.unfuse(t), t.blocks[0].norm1.weight.mul_(1.01)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_reading_after_a_change_raises(name: str, inference: bool) -> None:
    tower = tiny_tower()
    fusedvit.fuse(tower, STRICT)
    with torch.inference_mode(inference), torch.no_grad():
        call = Call.of(tower, GRIDS["mix"])
        ours = tower(call.pixels, grid_thw=call.grid, output_hidden_states=True)
    with torch.inference_mode(inference), torch.no_grad():
        CHANGES[name](tower, call)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="fusedvit: hidden_states of Qwen3VLVisionModel .*changed since"):
                _ = ours.hidden_states
        assert ours.pooler_output.isfinite().all() and len(ours) == 4


def test_pixels_that_change_their_order_within_a_row() -> None:
    """By so little that the answer hardly differs: what is read is of the call's input or it raises."""
    tower, _, call = fused_tower(config=STRICT)
    call.pixels[2, 1] = call.pixels[2, 0] + 1e-4
    ours = call.record(tower, output_hidden_states=True)
    call.pixels.numpy()[2, :2] = call.pixels.numpy()[2, 1::-1].copy()
    with pytest.raises(RuntimeError, match="pixel_values or grid_thw have changed since"):
        _ = ours.hidden_states


def test_reading_later_needs_neither_the_handle_nor_the_caller_s_tower() -> None:
    ours, ref, tower, _ = asked()
    tower(torch.randn(4, 96), grid_thw=torch.tensor([[1, 2, 2]]))  # another call
    fusedvit.unfuse(tower)
    del tower
    gc.collect()
    assert_record(ours, ref)


@pytest.mark.parametrize("gives_back", [lambda handle: handle.release(), lambda handle: fusedvit.unfuse(handle.tower)])
def test_weights_given_back_before_the_record_is_made(
    gives_back: Callable[[FusedEncoder], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread: the tower is what it was all the same."""

    def answer(self: FusedEncoder, *arguments: Any) -> Any:
        found = real(self, *arguments)
        gives_back(self)
        return found

    real = FusedEncoder.answer
    monkeypatch.setattr(FusedEncoder, "answer", answer)
    ours, ref, tower, _ = asked()
    assert_record(ours, ref)
    ours = asked(towers=(fusedvit.fuse(tower).tower, copy_of(tower)))[0]
    tower.blocks[0].norm1.weight.data.mul_(1.1)
    with pytest.raises(RuntimeError, match="weights have changed"):
        _ = ours.hidden_states


def test_last_hidden_state_written_to_by_the_caller() -> None:
    ours, ref, _, _ = asked()
    ours.last_hidden_state.zero_()
    assert error_of(ours.hidden_states[1], ref.hidden_states[1]) < 1e-5


def test_under_autocast_they_have_its_dtypes() -> None:
    tower, handle, call, original = fused_and_original(tiny_tower().to(torch.bfloat16), GRIDS["video"], STRICT)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, ref = (m(call.pixels, grid_thw=call.grid, output_hidden_states=True) for m in (tower, original))
    for a, b in zip(ours.hidden_states[:-1], ref.hidden_states[:-1], strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    ran_fused(handle, calls=1)


def test_a_list_as_grid() -> None:
    tower, _, call = fused_tower(grid=GRIDS["video"], config=STRICT)
    with torch.no_grad():
        ours = tower(call.pixels, grid_thw=call.grid.tolist(), output_hidden_states=True)
    assert len(ours.hidden_states) == tower.config.depth + 1


def test_a_tuple_needs_them_at_once() -> None:
    ours, ref, tower, call = asked()
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig())
    for given in ({"return_dict": False}, {}):
        tower.config.return_dict = bool(given)
        with torch.no_grad():
            found = tower(call.pixels, grid_thw=call.grid, output_hidden_states=True, **given)
        assert type(found) is tuple and len(found[-1]) == len(ref.hidden_states)
    assert handle.stats()["original"] == {"output_hidden_states": 2}


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.nn.functional.gelu else found


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a mode of the reader's sees nothing of it")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AMBIENT: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "the meta device": lambda: torch.device("meta"),
    "the CPU": lambda: torch.device("cpu"),
    "float64": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a function mode": Doubling,
    "a dispatch mode": Watching,
}


@pytest.mark.parametrize("reading", AMBIENT)
@pytest.mark.parametrize("calling", ["no_grad", "inference mode", "float64", "the CPU"])
def test_they_are_computed_as_at_the_call(calling: str, reading: str) -> None:
    """Whatever the reader has set, and it has it again afterwards."""
    tower, original = unchanged_pair()
    call = Call.of(tower, GRIDS["mix"])
    with torch.no_grad(), AMBIENT[calling]():
        ref, ours = (m(call.pixels, grid_thw=call.grid, output_hidden_states=True) for m in (original, tower))
    with AMBIENT[reading]():
        before = torch.get_default_dtype(), torch.is_inference_mode_enabled(), torch._C._len_torch_function_stack()
        hidden = ours.hidden_states
        after = torch.get_default_dtype(), torch.is_inference_mode_enabled(), torch._C._len_torch_function_stack()
    assert before == after
    for a, b in zip(hidden, ref.hidden_states, strict=True):
        assert a.dtype == b.dtype and a.device == b.device and error_of(a, b) < 1e-5
        assert a.is_inference() == b.is_inference() and a.requires_grad == b.requires_grad


TOLD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (
        lambda t: t.blocks[1].register_forward_hook(lambda *_: None),
        r"the tower has changed \(hooks: ",
    ),
    "module": (lambda t: t.blocks.append(t.blocks[0]), r"the tower has changed \("),
    "attention": (lambda t: t.set_attn_implementation("eager"), r"the tower has changed \(its attention is eager and"),
    "weights": (lambda t: t.blocks[0].norm1.weight.data.mul_(1.1), "the tower's weights have changed"),
    "parameter": (lambda t: t.blocks[0].norm1.weight.mul_(1.1), "the tower's weights have changed"),
}


@pytest.mark.parametrize("change", TOLD)
def test_the_error_says_what_has_changed(change: str) -> None:
    ours, _, tower, _ = asked()
    TOLD[change][0](tower)
    with pytest.raises(RuntimeError, match=f"^fusedvit: hidden_states of .*: {TOLD[change][1]}"):
        _ = ours.hidden_states
