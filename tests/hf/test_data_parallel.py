"""A call over several devices, which are the CPU several times here: the rows of one fused tower, bit for bit."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.data_parallel import DataParallelEncoder
from tests.support.changes import CHANGES, Change, undone
from tests.support.families import BY_GRID, each_of, family_tower
from tests.support.towers import outcome, vision_tower

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


def test_its_handle_counts_and_reports() -> None:
    encoder = DataParallelEncoder(family_tower("Qwen3VLVisionModel"), ["cpu"] * 3)
    encoder(pixels_of(encoder.handle.tower, GRIDS["mixed"]), GRIDS["mixed"])
    assert encoder.handle.stats()["fused"] == 1 and len(encoder.handle.stats()["copies"]) == 2
    assert re.fullmatch(r"<DataParallelEncoder: <FusedEncoder of .*>; copies on cpu, cpu>", repr(encoder))
    encoder.close()
    assert repr(encoder).endswith("; copies on none>")


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", ["before the copies", "after a call"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.apply.__name__)
def test_any_change_that_comes_and_goes(change: Change, made: str) -> None:
    """Copies have no part of it afterwards: they run fused, as the tower does, and give its rows."""
    tower, grid = vision_tower(), GRIDS["mixed"]
    fusedvit.fuse(tower)
    pixels, expected, encoders = pixels_of(tower, grid), expected_of(tower, grid), []

    def begin() -> None:
        encoders.append(outcome(DataParallelEncoder, tower, ["cpu", "cpu"]))

    if made == "after a call":
        begin()
        encoders[0](pixels, grid)
    with undone(tower):
        change.apply(tower)
        if made == "before the copies":
            begin()
        if isinstance(encoders[0], Exception):
            pytest.skip("no copy can be made of this tower, and none is")
        now = outcome(lambda: encoders[0](pixels, grid))
        if not isinstance(now, Exception) and not change.kind:
            torch.testing.assert_close(now, expected_of(tower, grid), atol=1e-5, rtol=1e-5)
    for _ in range(2):
        torch.testing.assert_close(encoders[0](pixels, grid), expected, atol=1e-5, rtol=1e-5)
    handles = [copied._handle.stats() for copied in encoders[0]._copies]
    assert [stats["original"] for stats in handles] == [{}] and handles[0]["fused"] >= 2


def adapters(tower: Any) -> list[Any]:
    return [m for m in tower.modules() if hasattr(m, "lora_A")]


ADAPTERS: dict[str, Callable[[Any], object]] = {
    "another": lambda t: [m.set_adapter("b") for m in adapters(t)],
    "both": lambda t: [m.set_adapter(["a", "b"]) for m in adapters(t)],
    "off": lambda t: [m.enable_adapters(False) for m in adapters(t)],
    "scale": lambda t: [m.set_scale("a", 3.0) for m in adapters(t)],
    "merged": lambda t: [m.merge() for m in adapters(t)],
    "merged and unmerged": lambda t: [(m.merge(), m.unmerge()) for m in adapters(t)],
    "dropout": lambda t: [m.lora_dropout.update({"b": nn.Dropout(0.5).eval()}) for m in adapters(t)],
    "deleted": lambda t: [m.delete_adapter("b") for m in adapters(t)],
    "unloaded": lambda t: [setattr(b.attn, "qkv", b.attn.qkv.base_layer) for b in t.blocks],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_followed(name: str) -> None:
    """In place where the modules stay, so that a copy keeps its graphs."""
    torch.manual_seed(0)
    tower, grid = vision_tower(), GRIDS["images"]
    for adapter in "ab":
        config = peft.LoraConfig(r=4, target_modules=r".*qkv", init_lora_weights=False)
        peft.inject_adapter_in_model(config, tower, adapter)
    tower.requires_grad_(False).eval()
    encoder = DataParallelEncoder(tower, ["cpu", "cpu"], fusedvit.FuseConfig(strict=True))
    pixels, handle = pixels_of(tower, grid), encoder._copies[0]._handle
    for change in (lambda t: None, ADAPTERS[name], ADAPTERS["scale"]):
        change(tower)
        tower.requires_grad_(False)
        torch.testing.assert_close(encoder(pixels, grid), expected_of(tower, grid), atol=1e-4, rtol=1e-4)
    assert (encoder._copies[0]._handle is handle) == (name not in ("unloaded", "dropout", "deleted"))


def test_a_change_that_only_calls_with_gradients_saw() -> None:
    """They ask nothing of a tower but its original code."""
    tower, grid = vision_tower(), GRIDS["images"]
    encoder = DataParallelEncoder(tower, ["cpu", "cpu"])
    pixels, handle = pixels_of(tower, grid), fusedvit.fuse(tower)
    expected = encoder(pixels, grid)
    handle.refresh()  # other weights than the copies have, of the same values
    tower.requires_grad_(True)
    with undone(tower), torch.enable_grad():
        _attribute(tower)
        assert encoder(pixels, grid).requires_grad
    tower.requires_grad_(False)
    torch.testing.assert_close(encoder(pixels, grid), expected, atol=1e-5, rtol=1e-5)


def test_what_hangs_on_the_tower_itself() -> None:
    """Hooks on it and a `forward` of its own are of its own calls, which these are not: they run for no row."""
    tower, grid = vision_tower(), GRIDS["images"]
    encoder = DataParallelEncoder(tower, ["cpu", "cpu"])
    pixels, own = pixels_of(tower, grid), tower.forward
    expected = encoder(pixels, grid)
    seen: list[object] = []
    tower.forward = lambda *given, **named: (seen.append(given), own(*given, **named))[1]
    tower.register_forward_hook(lambda *given: seen.append(given))
    with torch.no_grad():
        tower.blocks[0].attn.qkv.bias.add_(0.1)
    torch.testing.assert_close(encoder(pixels, grid), expected_of(tower, grid), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(encoder(pixels, grid), expected)
    seen.clear()
    encoder(pixels, grid)
    assert not seen


def test_a_compiled_call_is_of_its_own_module() -> None:
    """What torch compiled of a block of the tower is not what a copy's block runs."""
    tower, grid = vision_tower(), GRIDS["images"]
    encoder = DataParallelEncoder(tower, ["cpu", "cpu"])
    pixels = pixels_of(tower, grid)
    encoder(pixels, grid)
    tower.blocks[0].compile()
    torch.testing.assert_close(encoder(pixels, grid), expected_of(tower, grid), atol=1e-5, rtol=1e-5)
    fusedvit.fuse(tower).refresh()
    encoder(pixels, grid)
    assert encoder._copies[0]._tower.blocks[0]._compiled_call_impl is None
    assert fusedvit.fuse(tower).stats()["original"] == encoder._copies[0]._handle.stats()["original"] == {}


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
    with pytest.raises(RuntimeError, match="^fusedvit: Qwen3VLVisionModel cannot run fused: "):
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
        patched.setattr(
            "fusedvit.data_parallel.TowerCopy.run", lambda *given: (_ for _ in ()).throw(RuntimeError("lost"))
        )
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
