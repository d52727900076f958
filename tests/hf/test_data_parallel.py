"""A call over several devices, which are the CPU several times here: the rows of one fused tower, bit for bit."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.data_parallel import DataParallelEncoder
from tests.support.families import BY_GRID, each_of, family_tower

GRIDS = {
    "images": [(1, 4, 6), (1, 8, 4), (1, 2, 2), (1, 6, 6)],
    "one image": [(1, 4, 4)],
    "video": [(9, 4, 4)],
    "mixed": [(1, 4, 4), (5, 2, 4), (1, 8, 8), (2, 4, 4)],
}


def pixels_of(tower: nn.Module, grid: list[tuple[int, int, int]]) -> torch.Tensor:
    handle = fusedvit.fuse(tower)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sum(t * h * w for t, h, w in grid), handle.spec.patch_width, generator=generator)


def expected_of(tower: nn.Module, grid: list[tuple[int, int, int]]) -> torch.Tensor:
    """Each item by itself on a plain copy: on the CPU a row's last bits depend on how many rows run together."""
    plain = fusedvit.unfuse(copy.deepcopy(tower))
    return fusedvit.fuse(plain).concatenated(pixels_of(tower, grid), torch.tensor(grid))


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_rows_in_the_callers_order(devices: int, grid: list[tuple[int, int, int]]) -> None:
    tower = family_tower("Qwen3VLVisionModel")
    encoder = DataParallelEncoder(tower, ["cpu"] * devices, fusedvit.FuseConfig(strict=True))
    pixels = pixels_of(tower, grid)
    torch.testing.assert_close(encoder(pixels, grid), expected_of(tower, grid), atol=1e-5, rtol=1e-5)
    encoder.close()


@each_of([name for name in BY_GRID if "Glm" not in name])
def test_every_family(name: str) -> None:
    tower, grid = family_tower(name), GRIDS["mixed"]
    encoder = DataParallelEncoder(tower, ["cpu", "cpu"])
    found = encoder(pixels_of(tower, grid), torch.tensor(grid))
    torch.testing.assert_close(found, expected_of(tower, grid), atol=1e-5, rtol=1e-5)


def _in_place(tower: nn.Module) -> None:
    with torch.no_grad():
        next(tower.parameters()).mul_(2)


def _past_autograd(tower: Any) -> None:
    tower.blocks[0].mlp.linear_fc1.weight.data.mul_(2)


def _hook(tower: Any) -> None:
    tower.blocks[1].register_forward_hook(lambda module, given, found: found * 2)


def _attribute(tower: Any) -> None:
    tower.blocks[0].norm1.eps = 1.0


@pytest.mark.parametrize("change", [_in_place, _past_autograd, _hook, _attribute])
def test_changes_of_the_tower_are_followed(change: Callable[[nn.Module], None]) -> None:
    tower, grid = family_tower("Qwen3VLVisionModel"), GRIDS["mixed"]
    encoder = DataParallelEncoder(tower, ["cpu", "cpu"])
    before = encoder(pixels_of(tower, grid), grid)
    change(tower)
    found = encoder(pixels_of(tower, grid), grid)
    torch.testing.assert_close(found, expected_of(tower, grid), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, before)


def test_a_call_of_the_original_code_counts_once_and_has_gradients() -> None:
    tower, grid = family_tower("Qwen3VLVisionModel").requires_grad_(True), GRIDS["mixed"]
    encoder, handle = DataParallelEncoder(tower, ["cpu", "cpu"]), fusedvit.fuse(tower)
    with torch.enable_grad():
        found = encoder(pixels_of(tower, grid), grid)
        torch.testing.assert_close(found, expected_of(tower, grid), atol=1e-5, rtol=1e-5)
        assert found.requires_grad
    stats = handle.stats()
    assert (stats["calls"], stats["fused"], stats["original"]) == (1, 0, {"gradients": 1})


@pytest.mark.parametrize("change", [_hook, _attribute])
def test_a_tower_that_never_ran_fused(change: Callable[[nn.Module], None]) -> None:
    """It runs its original code, also at the very first call; with `strict` the message is a call's."""
    tower, grid = family_tower("Qwen3VLVisionModel"), GRIDS["mixed"]
    encoder, handle = DataParallelEncoder(tower, ["cpu", "cpu"]), fusedvit.fuse(tower)
    change(tower)
    found = encoder(pixels_of(tower, grid), grid)
    torch.testing.assert_close(found, expected_of(tower, grid), atol=1e-5, rtol=1e-5)
    assert handle.stats()["calls"] == 1 and sum(handle.stats()["original"].values()) == 1
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    with pytest.raises(RuntimeError, match="^fusedvit: Qwen3VLVisionModel runs its original code: "):
        encoder(pixels_of(tower, grid), grid)


@pytest.mark.parametrize(
    "grid, expected",
    [([(1, 4, 4), (1, 2, 2)], "16"), ([(1, 3, 4)], "merge"), ([(-1, 4, 4)], "t")],
)
def test_wrong_input_is_what_the_tower_says(grid: list[tuple[int, int, int]], expected: str) -> None:
    encoder = DataParallelEncoder(family_tower("Qwen3VLVisionModel"), ["cpu", "cpu"])
    pixels = pixels_of(family_tower("Qwen3VLVisionModel"), [(1, 4, 4)])[: 12 if grid == [(1, 3, 4)] else 16]
    with pytest.raises(ValueError, match=expected):
        encoder(pixels, grid)


@pytest.mark.parametrize(
    "devices, said",
    [
        ([], "at least one"),
        (["cpu", "tpu9"], "no device 'tpu9' here"),
        (["cuda:99"], "'cuda:99'"),
        (["cpu", "meta"], "must be CPUs and NVIDIA GPUs, got 'meta'"),
        ("cpu", "got 'cpu'"),
        (5, "at least one device, .*got 5"),
        (None, "got None"),
        (["cpu", 5.0], "names of devices, .*got 5.0"),
    ],
)
def test_devices_that_are_none(devices: Any, said: str) -> None:
    tower = family_tower("Qwen3VLVisionModel")
    before = type(tower)
    wrong_type = not isinstance(devices, list) or 5.0 in devices
    with pytest.raises(TypeError if wrong_type else ValueError, match=f"^fusedvit: devices.*{said}"):
        DataParallelEncoder(tower, devices)
    assert type(tower) is before


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="fusedvit: a DataParallelEncoder cannot be copied"):
        copied(DataParallelEncoder(family_tower("Qwen3VLVisionModel"), ["cpu", "cpu"]))


def test_one_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is raised when all have ended, and the next call is whole."""
    tower = family_tower("Qwen3VLVisionModel")
    encoder, grid = DataParallelEncoder(tower, ["cpu", "cpu"]), GRIDS["mixed"]
    with monkeypatch.context() as patched:
        patched.setattr("fusedvit.data_parallel._Copy.run", lambda *given: (_ for _ in ()).throw(RuntimeError("lost")))
        with pytest.raises(RuntimeError, match="lost"):
            encoder(pixels_of(tower, grid), grid)
    torch.testing.assert_close(encoder(pixels_of(tower, grid), grid), expected_of(tower, grid), atol=1e-5, rtol=1e-5)
    fusedvit.unfuse(tower)
    with pytest.raises(RuntimeError, match="was unfused: fuse it again"):
        encoder(torch.zeros(16, tower.patch_embed.proj.weight[0].numel()), [(1, 4, 4)])


def test_nothing_to_encode() -> None:
    tower = family_tower("Qwen3VLVisionModel")
    encoder = DataParallelEncoder(tower, ["cpu", "cpu"])
    pixels = pixels_of(tower, [(1, 2, 2)])[:0]
    assert encoder(pixels, torch.empty(0, 3, dtype=torch.long)).shape == expected_of(tower, [(1, 2, 2)])[:0].shape
