"""Inputs whose memory is not their value, and inputs elsewhere than the tower: what kernels and Hugging Face get."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedvit
from tests.support.families import each_of, family_tower
from tests.support.towers import Call, assert_same, copy_of, outputs_of

pytestmark = pytest.mark.gpu
GRID = [(1, 8, 4), (1, 2, 10)]
NAMES = ["Qwen2VisionTransformerPretrainedModel", "Qwen3VLVisionModel", "Gemma4VisionModel"]

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative": lambda x: torch._neg_view(-x),
    "imaginary": lambda x: torch.complex(x.float(), -x.float()).conj().imag,
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
    "overlapping": lambda x: x[:1].expand(x.shape),
    "overlapping windows": lambda x: x.flatten().as_strided(x.shape, (8, *x.stride()[1:])),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "float64": lambda x: x.double(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "on the CPU": lambda x: x.cpu(),
}
OF_GRIDS = ("negative", "zero", "every other row", "on the CPU")


def arguments(tower: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels of a call, and its grid or the positions of one padded image, on the GPU."""
    call = Call.of(tower, GRID)
    if type(tower).__name__ != "Gemma4VisionModel":
        return call.pixels.cuda(), call.grid.cuda()
    i = torch.arange(32, device="cuda")
    return call.pixels[:32].reshape(1, 32, -1).sigmoid().cuda(), torch.stack([i % 4, i // 4], -1)[None]


def answer(tower: Any, pixels: Any, grid: Any) -> Any:
    try:
        with torch.no_grad():
            found = outputs_of(tower(pixels, grid))
            torch.cuda.synchronize()
            return found
    except Exception as error:
        return error


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_of(NAMES)
def test_tensors_of_every_kind(name: str, dtype: torch.dtype, graphs: bool) -> None:
    """As Hugging Face's tower on the same values, before a replay and in one; the device lives on."""
    tower = family_tower(name).cuda().to(dtype)
    original = copy_of(tower)
    pixels, grid = arguments(tower)
    fusedvit.fuse(tower, fusedvit.FuseConfig(compile="now", graphs=graphs))
    limit = 0.1 if dtype == torch.bfloat16 else 1e-2  # of what is read wrong the error is about 1
    for given in ((pixels.to(dtype), grid), (pixels, grid)):
        assert_same(answer(tower, *given), answer(original, *given), limit)
        for kind, change in KINDS.items():
            for which in (0, 1):
                if which == 1 and kind not in OF_GRIDS:
                    continue
                changed = tuple(change(each) if i == which else each for i, each in enumerate(given))
                there = tuple(each.clone() if each._is_zerotensor() else each.resolve_neg().cuda() for each in changed)
                ref = answer(original, *there)
                for _ in range(2):
                    ours = answer(tower, *changed)
                    if isinstance(ref, Exception):
                        assert not isinstance(ours, Exception) or str(ours).startswith("fusedvit: "), (
                            kind,
                            which,
                            ours,
                        )
                    else:
                        assert not isinstance(ours, Exception), (kind, which, ours)
                        assert_same(ours, ref, limit)
        assert_same(answer(tower, *given), answer(original, *given), limit)


@pytest.mark.parametrize("reason", ["gradients", "hooks", "kernels not ready"])
@each_of(NAMES)
def test_inputs_elsewhere_where_a_call_falls_back(name: str, reason: str) -> None:
    tower = family_tower(name).cuda()
    original = copy_of(tower)
    pixels, grid = arguments(tower)
    handle = fusedvit.fuse(tower)
    if reason == "gradients":
        tower.requires_grad_(True)
    elif reason == "hooks":
        next(m for m in tower.modules() if isinstance(m, torch.nn.Linear)).register_forward_hook(lambda *_: None)
    ref = answer(original, pixels, grid)
    calls = [(pixels.cpu(), grid), (pixels, grid.cpu()), (pixels.cpu(), grid.cpu())]
    if name != "Gemma4VisionModel":
        calls += [(pixels, grid.tolist()), (pixels.cpu(), tuple(map(tuple, grid.tolist())))]
    for given in calls:
        if reason == "gradients":
            found = outputs_of(tower(*given))
            assert all(each.requires_grad for each in found.values())
            found = {key: each.detach() for key, each in found.items()}
        else:
            found = answer(tower, *given)
        assert not isinstance(found, Exception), found
        assert_same(found, ref, 5e-3)
    assert reason == "kernels not ready" or handle.stats()["original"] == {reason: len(calls)}
