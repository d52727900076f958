"""Hidden states that nobody reads: what walks over outputs computes none, crashes nowhere, and gives Hugging Face's."""

import copy
import dataclasses
import functools
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import _common_utils
from torch.distributed.utils import _apply_to_tensors
from torch.nn.parallel.distributed import _find_tensors
from torch.utils import _pytree

import fusedvit
from fusedvit.outputs.unread import UnreadStates, UnreadTensor
from tests.support.families import INSTALLED, each_of, family_tower
from tests.support.hidden_states import runs
from tests.support.towers import GRIDS, Call, assert_same, copy_of, error_of, fused_and_original, outputs_of, tiny_tower

__all__ = ["runs"]  # a fixture
STRICT = fusedvit.FuseConfig(strict=True)
LOST = "fusedvit: hidden_states of .* cannot be computed any more"


def asked(tower: Any = None, dtype: torch.dtype = torch.float32, selection: Any = True) -> tuple[Any, Any, Any]:
    """Our record, Hugging Face's, and the fused tower."""
    tower = (tower or tiny_tower()).to(dtype)
    original, call = copy_of(tower), Call.of(tower, GRIDS["images"])
    fusedvit.fuse(tower, STRICT)
    ours, ref = (call.record(t, output_hidden_states=selection) for t in (tower, original))
    return ours, ref, tower


def free(tower: Any) -> None:
    """As ZeRO-3 leaves parameters after each use."""
    for p in tower.parameters():
        p.data = p.data.new_empty(0)


def resize(tower: Any) -> None:
    """As FSDP leaves them."""
    for p in tower.parameters():
        p.untyped_storage().resize_(0)


def to_meta(tower: Any) -> None:
    """As accelerate's offloading leaves them."""
    tower.to("meta")


FREED = [free, resize, to_meta]


def numbers(value: Any) -> list[Any]:
    """Every tensor within, by Hugging Face's structure; reads what is unread."""
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "items"):
        value = list(value.values())
    return [t for v in value for t in numbers(v)] if isinstance(value, list | tuple) else []


def assert_alike(ours: Any, ref: Any, limit: float = 1e-5) -> None:
    a, b = numbers(ours), numbers(ref)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert (x.shape, x.dtype, x.device, x.requires_grad) == (y.shape, y.dtype, y.device, y.requires_grad)
        assert error_of(x, y) <= limit


def cast(t: Any) -> Any:
    """As FSDP2's `output_dtype` does."""
    return t.to(torch.float64) if isinstance(t, torch.Tensor) and torch.is_floating_point(t) else t


def send(record: Any) -> Any:
    from accelerate.utils import send_to_device

    return send_to_device(record, torch.device("cpu"))


def to_fp32(record: Any) -> Any:
    from accelerate.utils import convert_to_fp32

    return convert_to_fp32(record)


def searched(record: Any) -> Any:
    """As FSDP2 does for what wants gradients; of older torch it flattens the record."""
    if hasattr(_common_utils, "collect_grad_tensors"):
        assert not _common_utils.collect_grad_tensors(record)
    else:
        assert not [t for t in _pytree.tree_flatten(record)[0] if torch.is_tensor(t) and t.requires_grad]
    return record


_DEEPSPEED = """
def passed_on(value, function):
    if isinstance(value, (list, tuple)):
        return value.__class__(passed_on(v, function) for v in value)
    if isinstance(value, dict):
        for key in value.keys():
            value[key] = passed_on(value[key], function)
        return value
    return function(value)
"""


def passed_on(value: Any, function: Callable[[Any], Any]) -> Any:
    """As ZeRO-3's hooks do, in place."""
    module: dict[str, Any] = {"__name__": "deepspeed.runtime.zero.utils"}
    exec(_DEEPSPEED, module)
    return module["passed_on"](value, function)


def with_gradients(t: Any) -> Any:
    """As searches for what backward reaches do."""
    assert not t.requires_grad and t.grad_fn is None and t.is_leaf
    return t


WALKS: dict[str, Callable[[Any], Any]] = {
    "to_tuple": lambda r: r.to_tuple(),
    "slice": lambda r: r[1:],
    "values": lambda r: [*r.values()],
    "items": lambda r: [*r.items()],
    "tree_map": lambda r: _pytree.tree_map(lambda t: t, r),
    "tree_map over its tuple": lambda r: _pytree.tree_map(lambda t: t, r.to_tuple()),
    "tree_map that casts": lambda r: _pytree.tree_map(cast, r),
    "tree_map that casts twice": lambda r: _pytree.tree_map(lambda t: t.half().float(), r),
    "tree_map that detaches": lambda r: _pytree.tree_map(torch.Tensor.detach, r),
    "tree_map of tensors alone": lambda r: _pytree.tree_map_only(torch.Tensor, lambda t: t.to("cpu"), r),
    "what wants gradients": lambda r: _pytree.tree_map(with_gradients, r),
    "accelerate moves it": send,
    "accelerate casts it": to_fp32,
    "DDP searches it": lambda r: [*_find_tensors(r)],
    "a list": lambda r: [[*v] for v in r.to_tuple()[1:]],
    "FSDP casts it": lambda r: _apply_to_tensors(cast, r),
    "FSDP passes it on": lambda r: _apply_to_tensors(lambda t: t, r),
    "a copy of the dataclass": dataclasses.replace,
    "FSDP2 searches it": searched,
    "DeepSpeed passes it on": lambda r: passed_on(r, lambda t: t),
    "DeepSpeed casts it": lambda r: passed_on(r, torch.Tensor.double),
}


@pytest.mark.parametrize("walk", WALKS)
def test_walking_computes_nothing(walk: str, runs: list[int]) -> None:
    ours, ref, tower = asked(dtype=torch.bfloat16)
    walked, expected = WALKS[walk](ours), WALKS[walk](ref)
    assert not runs
    assert_alike(walked, expected, 2e-2)
    assert len(runs) == 1 and tower is not None
    assert_alike(ours, ref, 2e-2)
    assert len(runs) == 1


@pytest.mark.parametrize("freed", FREED)
@pytest.mark.parametrize("walk", WALKS)
def test_walking_where_parameters_are_freed(walk: str, freed: Callable[[Any], None]) -> None:
    """It crashes nowhere; the content of what it gives does."""
    ours, _, tower = asked(dtype=torch.bfloat16)
    freed(tower)
    found = WALKS[walk](ours)
    for unread in (found, ours):
        with pytest.raises(RuntimeError, match=LOST):
            assert all(t.isfinite().all() for t in numbers(unread))


@pytest.mark.parametrize("gone", [free, to_meta], ids=["freed", "meta"])
def test_what_was_read_too_late_says_so(gone: Callable[[Any], None]) -> None:
    """Nothing of it looks like an empty tuple, or like a tensor with some content."""
    ours, ref, tower = asked()
    gone(tower)
    del tower
    for read in (
        lambda: ours.hidden_states,
        lambda: ours["hidden_states"],
        lambda: ours.get("hidden_states"),
        lambda: ours[-1],
    ):
        with pytest.raises(RuntimeError, match=LOST):
            read()
    for late in (ours.to_tuple()[-1], list(ours.values())[-1], dict(ours.items())["hidden_states"]):
        assert isinstance(late, tuple) and len(late) == len(ref.hidden_states) and late
        for use in USES.values():
            with pytest.raises(RuntimeError, match=LOST):
                use(late)
        for t in late:
            for use in USES_OF_ONE.values():
                with pytest.raises(RuntimeError, match=LOST):
                    use(t)
    for use in (copy.copy, copy.deepcopy, pickle.dumps, lambda r: r == r, lambda r: r | {}):
        with pytest.raises(RuntimeError, match=LOST):
            use(ours)
    assert ours.pooler_output.isfinite().all() and "computed when first read" in repr(ours)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def torch_array(value: Any) -> Any:
    return torch.from_numpy(np.array(value))


USES: dict[str, Callable[[Any], Any]] = {
    "item": lambda h: h[1],
    "last": operator.itemgetter(-1),
    "slice": lambda h: h[1:],
    "stack": torch.stack,
    "cat": lambda h: torch.cat(h, dim=-1),
    "stack, by name": lambda h: torch.stack(tensors=h),
    "stack of a part": lambda h: torch.stack([h[0], *h]),
    "sum": lambda h: sum(h[1:], start=h[0]),
    "added": lambda h: h + (torch.zeros(1),),
    "added to": lambda h: (torch.zeros(1), *((torch.zeros(1),) + h)),
    "times": lambda h: h * 2,
    "times, reversed": lambda h: 2 * h,
    "reversed": lambda h: [t + 0 for t in reversed(h)],
    "contains": lambda h: [torch.tensor(float(None in h[:0] or h.count(None)))],
    "hash": lambda h: [torch.zeros(1)] if hash(h) else [torch.zeros(1)],
    "equality": lambda h: [torch.zeros(1)] if h == () else [torch.ones(1)],
    "equality, reversed": lambda h: [torch.zeros(1)] if operator.eq((), h) else [torch.ones(1)],
    "inequality": lambda h: [torch.ones(1)] if h != () else [torch.zeros(1)],
    "order": lambda h: [torch.ones(1)] if h > () else [torch.zeros(1)],
    "copy": lambda h: copy.copy(h)[:],
    "deepcopy": lambda h: copy.deepcopy(h),
    "deepcopy of a tuple with it": lambda h: copy.deepcopy((h, 1)),
    "pickle": lambda h: pickle.loads(pickle.dumps(h)),
    "pickle of a tuple with it": lambda h: pickle.loads(pickle.dumps((1, h))),
    "torch.save": saved,
    "norms": lambda h: [torch._foreach_norm(h)],
    "C's item": lambda h: tuple.__getitem__(h, 1) + 0,
    "C's stack": lambda h: torch.stack(tuple(tuple.__iter__(h))),
}
USES_OF_ONE: dict[str, Callable[[Any], Any]] = {
    "added": lambda t: t + 1,
    "added to": lambda t: torch.ones(1) + t,
    "float, and used": lambda t: t.float().sum(),
    "to, and used": lambda t: t.to("cpu", torch.float64).mean(-1),
    "into": lambda t: torch.zeros(()).add_(t.sum()),
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "an array": torch_array,
    "shape": lambda t: torch.zeros(t.shape),
    "sizes without overrides": lambda t: _plainly(lambda: torch.zeros(t.size())),
    "an operator without overrides": lambda t: _plainly(lambda: t.flatten() * 2),
    "length": lambda t: torch.zeros(len(t)),
    "rows": lambda t: [*t],
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "an address": lambda t: torch.tensor(float(t.data_ptr() > 0)),
    "its dtype as another's": lambda t: torch.zeros(1, dtype=torch.float16).to(t).to("cpu"),
    "einsum": lambda t: torch.einsum("nd,nd->n", t, t),
    "a list": lambda t: torch.tensor(t.tolist()),
    "out": lambda t: torch.add(t, 1, out=torch.empty(0)),
}


def _plainly(compute: Callable[[], Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return compute()


@pytest.mark.parametrize("use", USES)
def test_uses_of_the_tuple(use: str) -> None:
    ours, ref, tower = asked()
    unread, expected = ours.to_tuple()[-1], ref.to_tuple()[-1]
    assert type(unread) is UnreadStates and isinstance(unread, tuple)
    assert_alike(USES[use](unread), USES[use](expected))
    assert tower is not None


@pytest.mark.parametrize("use", USES_OF_ONE)
def test_uses_of_a_tensor(use: str, runs: list[int]) -> None:
    ours, ref, tower = asked()
    first = next(t for t in _pytree.tree_leaves(ours) if type(t) is UnreadTensor)
    assert not runs and isinstance(first, torch.Tensor) and "computed when first read" in repr(first)
    assert_alike(USES_OF_ONE[use](first), USES_OF_ONE[use](ref.hidden_states[0]))
    assert len(runs) == 1 and tower is not None


def test_what_is_written_to_one_is_there_for_all() -> None:
    ours, ref, tower = asked()
    first = next(t for t in _pytree.tree_leaves(ours) if type(t) is UnreadTensor)
    copied, same, other = first.double(), first.float(), first.detach()
    first.add_(1)
    for written in (first, same, other, ours.hidden_states[0]):
        assert error_of(written, ref.hidden_states[0] + 1) < 1e-5
    assert error_of(copied, ref.hidden_states[0]) < 1e-5
    assert tower is not None


def test_tensors_out_of_their_places_make_a_plain_tuple() -> None:
    ours, ref, tower = asked()
    unread = ours.to_tuple()[-1]
    tensors = unread.tensors()
    other = asked()[0].to_tuple()[-1].tensors()
    cases = (tensors[::-1], tensors[:-1], (*tensors, tensors[0]), (tensors[0].double(), *tensors[1:]), (), (1, 2))
    mixed = (tensors[0].double(), *(t.half() for t in tensors[1:]))
    for made in (*cases, mixed, (*other[:1], *tensors[1:])):
        assert type(UnreadStates(made)) is tuple and len(UnreadStates(made)) == len(made)
    assert type(UnreadStates(tensors)) is type(UnreadStates(t.double() for t in tensors)) is UnreadStates
    assert_alike(UnreadStates(tensors[::-1]), ref.hidden_states[::-1])
    assert tower is not None


@pytest.mark.parametrize("selection", [[0, 2], 1])
def test_selected_hidden_states(selection: Any) -> None:
    """How many there are is known when they are read."""
    ours, ref, tower = asked(selection=selection)
    unread = ours.to_tuple()[-1]
    assert type(unread) is UnreadStates and len(unread) == len(ref.hidden_states)
    ours, ref, tower = asked(selection=selection)
    for walk in (functools.partial(_pytree.tree_map, lambda t: t), send):
        found = walk(ours).hidden_states
        assert [t is None for t in found] == [t is None for t in ref.hidden_states]
        assert_alike(found, ref.hidden_states)
    ours, ref, tower = asked(selection=selection)
    free(tower)
    unread = send(ours).to_tuple()[-1]
    for use in (len, torch.stack, USES["item"], lambda h: [t + 1 for t in h]):
        with pytest.raises(RuntimeError, match=LOST):
            use(unread)


@each_of(INSTALLED)
def test_what_is_known_before_they_are_computed(name: str, runs: list[int]) -> None:
    """Their number, dtypes and devices, whatever the family."""
    ours, ref, tower = asked(family_tower(name))
    unread = ours.to_tuple()[list(ours).index("hidden_states")]
    known = [(t.dtype, t.device, t.requires_grad, t.is_leaf, t.is_floating_point()) for t in unread.tensors()]
    assert not runs
    expected = ref.hidden_states
    assert known == [(t.dtype, t.device, t.requires_grad, t.is_leaf, t.is_floating_point()) for t in expected]
    assert_same(outputs_of(_pytree.tree_map(lambda t: t, ours)), outputs_of(ref))
    assert tower is not None


def test_under_autocast_their_dtypes_are_read(runs: list[int]) -> None:
    tower, _, call, original = fused_and_original(tiny_tower().to(torch.bfloat16), GRIDS["images"], STRICT)
    with torch.autocast("cpu", torch.bfloat16):
        ours, ref = (call.record(t, output_hidden_states=True) for t in (tower, original))
    tensors = ours.to_tuple()[-1].tensors()
    assert not any(t.requires_grad for t in tensors) and not runs
    assert [t.dtype for t in tensors] == [t.dtype for t in ref.to_tuple()[-1]] and len(runs) == 1
