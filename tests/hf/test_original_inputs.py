"""What the original code gets of a call that falls back, and what is refused: as Hugging Face's tower, or typed."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedvit
from fusedvit.calls.original_inputs import for_original
from fusedvit.checks import fallback
from fusedvit.families.registry import family_of
from tests.support.families import BY_GRID, INSTALLED, each_of, family_tower
from tests.support.towers import Call, assert_same, fused_tower, outcome, outputs_of, ran_original

GRID = [(1, 8, 4), (1, 2, 10)]


def hooked(tower: Any) -> None:
    inner = next(module for module in tower.modules() if isinstance(module, nn.Linear))
    inner.register_forward_hook(lambda *_: None)


def trained(tower: Any) -> None:
    tower.requires_grad_(True)


FALLS_BACK: dict[str, Callable[[Any], None]] = {"hooks": hooked, "gradients": trained}


@pytest.mark.parametrize("reason", FALLS_BACK)
@each_of(BY_GRID)
def test_rows_as_grid_where_a_call_falls_back(name: str, reason: str) -> None:
    tower, handle, call = fused_tower(family_tower(name), GRID)
    FALLS_BACK[reason](tower)
    ref = outputs_of(call.record(tower))
    for grid in (list(map(list, GRID)), tuple(GRID)):
        assert_same(outputs_of(tower(call.pixels, grid_thw=grid)), ref, 0.0)
    assert handle.concatenated(call.pixels, list(GRID)).shape[0] == handle.concatenated(call.pixels, call.grid).shape[0]
    assert handle.stats()["original"] == {reason: 5}
    with pytest.raises(ValueError, match=r"^fusedvit: grid_thw\[0\] must be .* \(t, h, w\), got 2 values"):
        tower(call.pixels, grid_thw=[(1, 2)])


@each_of(INSTALLED)
def test_what_the_original_takes_is_handed_on_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, seen = family_tower(name), list[Any]()
    original = type(tower)
    fusedvit.fuse(tower)
    monkeypatch.setattr(original, "forward", lambda self, *given, **_: seen.extend(given))
    pixels, grid = torch.rand(4, 96), torch.tensor([[1, 2, 2]])
    tower(pixels, grid)
    assert seen[0] is pixels and seen[1] is grid


class Holder(nn.Module):
    """Parameters on these devices."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        for i, device in enumerate(devices):
            self.register_parameter(f"p{i}", nn.Parameter(torch.empty(1, device=device), requires_grad=False))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("places", [("cpu", "cpu"), ("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")], ids=str)
@pytest.mark.parametrize("devices", [("cuda",), ("cuda", "cpu"), ("meta",), ()], ids=str)
def test_tensors_move_to_the_one_device_of_a_tower(devices: Any, places: Any, padded: bool) -> None:
    """Where there are several, or none, whoever put the tower there sees to it."""
    with FakeTensorMode():
        tower = Holder(*devices)
        given = torch.empty(4, 96, device=places[0]), torch.empty(1, 3, dtype=torch.int64, device=places[1])
        got = for_original(tower, *given, padded)
    for before, after in zip(given, got, strict=True):
        moves = devices == ("cuda",) and before.device.type == "cpu"
        assert after.device.type == "cuda" if moves else after is before


def test_a_grid_of_rows_goes_where_the_pixels_are_if_the_tower_is_everywhere() -> None:
    with FakeTensorMode():
        pixels = torch.empty(4, 96, device="cuda")
        assert for_original(Holder("cuda", "cpu"), pixels, [(1, 2, 2)])[1].device.type == "cuda"
        assert for_original(Holder(), torch.empty(4, 96), [(1, 2, 2)])[1].device.type == "cpu"


NO_FRAMES = {  # and whether frame k is of another size than item k
    "last": ([(1, 8, 4), (0, 4, 4)], False),
    "first": ([(0, 2, 8), (1, 4, 4)], True),
    "first, of the same size": ([(0, 4, 4), (1, 4, 4)], False),
    "before frames": ([(1, 4, 8), (0, 4, 4), (2, 4, 8)], True),
}


@pytest.mark.parametrize("on_gpu", [False, True], ids=["grid on the host", "grid on a GPU"])
@pytest.mark.parametrize("where", NO_FRAMES)
@each_of(BY_GRID)
def test_items_without_frames(name: str, where: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM-4V's positions are those of another item then, unless that has the same size."""
    monkeypatch.setattr("fusedvit.runtime.inputs.is_on_gpu", lambda _: on_gpu)
    original, tower, (grid, other) = family_tower(name), family_tower(name), NO_FRAMES[where]
    call, handle = Call.of(original, grid), fusedvit.fuse(tower)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["original"] == ({"items without frames": 1} if other and name.startswith("Glm4v") else {})


@pytest.mark.parametrize("on_gpu", [False, True], ids=["grid on the host", "grid on a GPU"])
@pytest.mark.parametrize("zeros", [(0, 0, 0), (0, 0, 4), (0, 4, 0)], ids=str)
@each_of(BY_GRID)
def test_rows_of_zeros(name: str, zeros: Any, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As padding a batch's grids leaves them: Hugging Face's code answers. It does not mend the other rows."""
    monkeypatch.setattr("fusedvit.runtime.inputs.is_on_gpu", lambda _: on_gpu)
    original, tower = family_tower(name), family_tower(name)
    call, handle = Call.of(original, [(1, 8, 4), (1, 4, 6), zeros]), fusedvit.fuse(tower)
    assert_same(call.run(tower), call.run(original))
    ran_original(handle, fallback.EMPTY_ITEMS)
    for wrong, message in (((1, 3, 2), "grid_thw\\[1] needs h to be a multiple"), ((1, 2, 2), "needs 36 patch rows")):
        with pytest.raises(ValueError, match=message):
            tower(call.pixels, torch.tensor([(1, 8, 4), wrong, zeros]))


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "meta": lambda x: x.to("meta"),
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([*x]),
    "jagged": lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "negative": lambda x: torch._neg_view(-x),
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "expanded": lambda x: x[:1].expand(x.shape),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "imaginary": lambda x: torch.complex(x, -x).conj().imag,
}


@torch.no_grad()
def answer(tower: Any, given: Any, **arguments: Any) -> Any:
    return outputs_of(tower(*given, **arguments))


@pytest.mark.parametrize("which", [0, 1], ids=["pixels", "grid"])
@each_of(INSTALLED)
def test_tensors_of_every_kind(name: str, which: int) -> None:
    """Where Hugging Face's tower answers so does ours, and where both fail ours says what it is about; a subclass is
    Hugging Face's to refuse."""
    tower, original = _pair(name)
    call = Call.of(tower, GRID)
    given = list(_arguments(tower, call))
    for kind, change in KINDS.items():
        try:
            changed = change(given[which])
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # there is no such tensor
        inputs = [changed if i == which else each for i, each in enumerate(given)]
        for asked in ({}, {"output_hidden_states": True}):
            ref, ours = (outcome(answer, t, inputs, **asked) for t in (original, tower))
            if isinstance(ref, Exception):
                typed = str(ours).startswith("fusedvit: ") or kind == "jagged"
                assert not isinstance(ours, Exception) or typed, (kind, asked, ours)
            else:
                assert not isinstance(ours, Exception), (kind, asked, ours)
                assert_same(ours, ref, 1e-5)


@functools.cache
def _pair(name: str) -> tuple[Any, Any]:
    tower = family_tower(name)
    original = copy.deepcopy(tower)
    fusedvit.fuse(tower)
    return tower, original


def _arguments(tower: Any, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """As the tower is called: of a padded family two images of the same patches, and positions."""
    family = family_of(type(tower).__name__)
    if family is None or family.call is None:
        return call.pixels, call.grid
    pixels = call.pixels[:32].reshape(1, 32, -1).sigmoid()
    i = torch.arange(32)
    return pixels, torch.stack([i % 4, i // 4], -1)[None]


def test_sparse_pixels_that_hugging_face_multiplies_are_counted() -> None:
    tower, original = _pair("Ernie4_5_VLMoeVisionTransformerPretrainedModel")
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRID)
    before = handle.stats()["original"].get("sparse pixels", 0)
    given = call.pixels.to_sparse(), call.grid
    assert_same(answer(tower, given), answer(original, given))
    assert handle.stats()["original"]["sparse pixels"] == before + 1
