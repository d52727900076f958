"""Gemma 4: padded batches, soft-token budgets, odd positions, clipped layers, videos, whole models."""

import inspect
import re
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.bench.towers import padded_images, random_weights_
from fusedvit.checks.fallback import FOREIGN_CODE
from fusedvit.errors import ODD_POSITIONS
from fusedvit.graphs.limits import check_limits
from tests.support.families import INSTALLED, family_tower
from tests.support.towers import (
    Call,
    Grid,
    assert_same,
    copy_of,
    error_of,
    outputs_of,
    patches_of,
    ran_fused,
    ran_original,
)
from tests.unit.graphs.stand_in import graphs_on_cpu

NAME = "Gemma4VisionModel"
pytestmark = pytest.mark.skipif(NAME not in INSTALLED, reason="this transformers has no Gemma 4")
STRICT = fusedvit.FuseConfig(strict=True)
WIDTH = 48  # of a patch of 4 x 4 pixels
# What the image processor makes of images of other aspect ratios: at most so many patches, sides of multiples of 3.
BUDGETS: dict[int, Grid] = {
    70: [(1, 21, 30), (1, 30, 21), (1, 3, 210)],
    140: [(1, 42, 30), (1, 24, 51)],
    280: [(1, 42, 60), (1, 60, 42)],
    560: [(1, 60, 84)],
    1120: [(1, 96, 105)],
}


def tower_of(**numbers: Any) -> Any:
    plain = {"use_clipped_linears": False, "standardize": False, "pooling_kernel_size": 3}
    return family_tower(NAME, **({"position_embedding_size": 256} | plain | numbers))


def batch(grid: Grid, patches: int, merge: int = 3, seed: int = 1) -> dict[str, torch.Tensor]:
    """Images with as many patches each, as the processor pads them: zeros, at positions of -1."""
    pixels = torch.randn(patches_of(grid), WIDTH, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1)
    images, positions = padded_images(pixels, grid, merge)
    padded, at = images.new_zeros(len(grid), patches, WIDTH), torch.full((len(grid), patches, 2), -1)
    room = min(patches, images.shape[1])
    padded[:, :room], at[:, :room] = images[:, :room], positions[:, :room]
    return {"pixel_values": padded, "pixel_position_ids": at}


def run(tower: Any, inputs: dict[str, torch.Tensor], **arguments: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return outputs_of(tower(**inputs, **arguments))


@pytest.mark.parametrize("tokens", BUDGETS)
def test_every_soft_token_budget(tokens: int) -> None:
    tower = tower_of(num_hidden_layers=1)
    inputs = batch(BUDGETS[tokens], 9 * tokens)
    expected = run(copy_of(tower), inputs)
    handle = fusedvit.fuse(tower, STRICT)
    assert_same(run(tower, inputs), expected)
    ran_fused(handle, calls=1)
    assert handle.stats()["patch_tokens"] == patches_of(BUDGETS[tokens])


@pytest.mark.parametrize("numbers", [{}, {"standardize": True}, {"use_clipped_linears": True}], ids=str)
def test_padding_is_not_computed_and_changes_nothing(numbers: dict[str, Any]) -> None:
    tower = tower_of(**numbers)
    grid: Grid = [(1, 6, 9), (1, 3, 3), (1, 9, 3)]
    tight, roomy = batch(grid, 54), batch(grid, 54 + 90)
    expected = run(copy_of(tower), tight)
    handle = fusedvit.fuse(tower, STRICT)
    for inputs in (tight, roomy):
        assert_same(run(tower, inputs), expected)
    assert handle.stats()["patch_tokens"] == 2 * patches_of(grid)


def test_garbage_in_padding_is_never_read() -> None:
    tower = tower_of()
    inputs = batch([(1, 6, 9), (1, 3, 3)], 63)
    fusedvit.fuse(tower, STRICT)
    clean = run(tower, inputs)
    inputs["pixel_values"][inputs["pixel_position_ids"][..., 0] < 0] = float("nan")
    assert_same(run(tower, inputs), clean, limit=0)


def moved(inputs: dict[str, torch.Tensor], change: Any) -> dict[str, torch.Tensor]:
    positions = inputs["pixel_position_ids"].clone()
    change(positions)
    return inputs | {"pixel_position_ids": positions}


ODD = {
    "padding first": lambda p: p.copy_(p.flip(1)),
    "another order": lambda p: p[0, :6].copy_(p[0, :6].flip(0)),
    "moved to the right": lambda p: p[0, :54, 0].add_(3),
    "a hole": lambda p: p[0, 20].fill_(-1),
    "no patch at all": lambda p: p[0].fill_(-1),
    "half of a position": lambda p: p[0, 60, 0].fill_(0),
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_odd_positions_run_the_original_code(change: Any) -> None:
    tower = tower_of()
    inputs = moved(batch([(1, 6, 9), (1, 3, 6)], 72), change)
    expected = run(copy_of(tower), inputs)
    handle = fusedvit.fuse(tower)
    assert_same(run(tower, inputs), expected, limit=0)
    assert handle.stats()["original"] == {"odd positions": 1}


def test_another_pooling_size_runs_the_original_code() -> None:
    """16 patches and a pooling size of 3: Hugging Face pools 4 x 4."""
    tower = tower_of()
    inputs = batch([(1, 4, 4)], 16, merge=4)
    expected = run(copy_of(tower), inputs)
    assert expected["last_hidden_state"].shape[0] == 1
    handle = fusedvit.fuse(tower)
    assert_same(run(tower, inputs), expected, limit=0)
    assert handle.stats()["original"] == {"odd positions": 1}


@pytest.mark.parametrize("pixels", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_pixels_are_scaled_in_their_own_dtype(pixels: torch.dtype) -> None:
    tower = tower_of()
    inputs = batch([(1, 6, 9), (1, 3, 3)], 54)
    inputs["pixel_values"] = inputs["pixel_values"].to(pixels)
    expected = run(copy_of(tower), inputs)
    fusedvit.fuse(tower, STRICT)
    assert_same(run(tower, inputs), expected)


def test_arguments_by_position_and_in_int32() -> None:
    tower = tower_of()
    inputs = batch([(1, 6, 9)], 54)
    expected = run(copy_of(tower), inputs)
    fusedvit.fuse(tower, STRICT)
    with torch.no_grad():
        assert_same(outputs_of(tower(inputs["pixel_values"], inputs["pixel_position_ids"].int())), expected)
    with pytest.raises(TypeError, match="pixel_position_ids"):
        tower(pixel_values=inputs["pixel_values"])


@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "pixel_values",
            torch.rand(54, WIDTH),
            r"pixel_values must have shape \(images, patches, 48\), got \(54, 48\)",
        ),
        ("pixel_values", torch.zeros(1, 54, WIDTH, dtype=torch.uint8), "must be normalised floats"),
        ("pixel_position_ids", torch.zeros(1, 53, 2, dtype=torch.int64), r"must be \(1, 54, 2\) of int64 or int32"),
        ("pixel_position_ids", torch.zeros(1, 54, 2), "of int64 or int32, got"),
        ("pixel_position_ids", [[0, 0]], "pixel_position_ids must be a tensor, got list"),
    ],
)
def test_wrong_input(name: str, value: Any, message: str) -> None:
    tower = tower_of()
    inputs = batch([(1, 6, 9)], 54)
    expected = run(copy_of(tower), inputs)
    handle = fusedvit.fuse(tower)
    with torch.no_grad(), pytest.raises((TypeError, ValueError), match=message):
        tower(**(inputs | {name: value}))
    assert_same(run(tower, inputs), expected)
    assert handle.stats()["original"] == {}


def test_bounds_that_differ_run_the_original_code() -> None:
    """One product runs q, k and v, and one gate and up: they read one input."""
    tower = tower_of(use_clipped_linears=True)
    inputs = batch([(1, 6, 9)], 54)
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig())
    run(tower, inputs)
    tower.encoder.layers[1].self_attn.k_proj.input_max.fill_(0.5)
    expected = run(fusedvit.unfuse(copy_of(tower)), inputs)
    assert_same(run(tower, inputs), expected, limit=0)
    assert handle.stats()["original"] == {"modified modules": 1}
    assert "k_proj" in handle.report()


def test_bounds_and_standardisation_are_followed() -> None:
    """Buffers that the tower computes with count as weights."""
    tower = tower_of(use_clipped_linears=True, standardize=True)
    inputs = batch([(1, 6, 9)], 54)
    handle = fusedvit.fuse(tower, STRICT)
    before = run(tower, inputs)["last_hidden_state"]
    changed = [tower.std_bias, tower.std_scale, *(b for n, b in tower.named_buffers() if "layers.0.mlp.down" in n)]
    for buffer in changed:
        buffer.mul_(0.5)
        after = run(tower, inputs)
        assert_same(after, run(fusedvit.unfuse(copy_of(tower)), inputs))
    assert handle.stats()["original"] == {} and not after["last_hidden_state"].equal(before)


@pytest.mark.parametrize("when", ["before fuse", "after a call"])
@pytest.mark.parametrize("implementation", [None, "paged|eager"])
def test_attention_without_a_mask_function(implementation: str | None, when: str) -> None:
    """transformers makes no mask for it, and then images attend to their padding; 5.20 refuses to run paged ones."""
    tower, inputs = tower_of(), batch([(1, 6, 9), (1, 3, 6)], 54)
    original = copy_of(tower)
    plain, handle = run(original, inputs), fusedvit.fuse(tower) if when == "after a call" else None
    if handle is not None:
        assert_same(run(tower, inputs), plain)
    for each in (tower, original):
        each.config._attn_implementation_internal = implementation
    handle = handle or fusedvit.fuse(tower)
    try:
        expected = run(original, inputs)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            run(tower, inputs)
    else:
        assert error_of(expected["last_hidden_state"], plain["last_hidden_state"]) > 1e-3
        assert_same(run(tower, inputs), expected)
        assert f"no mask function {implementation!r}" in handle.stats()["details"][FOREIGN_CODE]
    ran_original(handle, FOREIGN_CODE)
    tower.config._attn_implementation_internal = "sdpa"
    assert_same(run(tower, inputs), plain)
    assert handle.stats()["fused"] == 1 + (when == "after a call")


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_pooling_size_that_changes_runs_the_original_code(used: bool) -> None:
    tower = tower_of()
    inputs = batch([(1, 6, 6)], 36)
    handle = fusedvit.fuse(tower)
    if used:
        run(tower, inputs)
    tower.config.pooling_kernel_size = 2
    expected = run(fusedvit.unfuse(copy_of(tower)), inputs)
    assert expected["last_hidden_state"].shape[0] == 9
    assert_same(run(tower, inputs), expected, limit=0)
    assert handle.stats()["original"] == {"modified modules": 1}


def test_graphs_of_soft_token_budgets() -> None:
    """Budgets count pooled tokens; batches are packed, and what none holds runs eagerly."""
    tower = family_tower(NAME)
    original = copy_of(tower)
    handle = fusedvit.fuse(tower, STRICT)
    handle.refresh()
    grids: list[Grid] = [[(1, 4, 6), (1, 2, 2)], [(1, 8, 8)] * 3, [(1, 4, 4)] * 9, [(1, 2, 14)], [(1, 20, 20)]]
    with graphs_on_cpu(handle, check_limits((4, 16, 64), 4, 8)) as graphs:
        for seed, grid in enumerate(grids):
            call = Call.of(tower, grid, seed)
            assert_same(call.run(tower), call.run(original))
        assert sum(graphs.manager.stats.replays.values()) > 4
    assert handle.stats()["original"] == {}


def test_a_replay_begins_before_anybody_has_read_what_is_padding() -> None:
    """The padded size is the budget's: whatever part of it images fill, calls replay one graph, for the same bits."""
    tower = tower_of()
    original, handle = copy_of(tower), fusedvit.fuse(tower)
    handle.refresh()
    grids: list[Grid] = [[(1, 6, 9), (1, 3, 3)], [(1, 9, 6), (1, 9, 6)], [(1, 3, 3), (1, 3, 6)]]
    with graphs_on_cpu(handle, check_limits((4, 12, 16), 4, 8)) as graphs:
        first = [run(tower, batch(grid, 54)) for grid in grids]
        again = [run(tower, batch(grid, 54)) for grid in grids]
        held = graphs.manager.stats.as_dict()
        odd = batch(grids[0], 54)
        odd["pixel_position_ids"][0, 1] = 5
        assert_same(run(tower, odd), run(original, odd))
    for grid, *found in zip(grids, first, again, strict=True):
        expected = run(original, batch(grid, 54))
        for outputs in found:
            assert_same(outputs, expected)
        assert all(torch.equal(a, b) for a, b in zip(found[0].values(), found[1].values(), strict=True))
    assert held["replays_by_budget"] == {12: 6} and held["merged_tokens"] == 2 * (7 + 12 + 3)
    assert held["mispredictions"] == 0 and graphs.manager.stats.mispredictions == 1, "dropped where positions are odd"
    assert list(handle.stats()["original"]) == [ODD_POSITIONS]


# ── whole models ──────────────────────────────────────────────────────────────────────────────────────────────────────

TOKENS = {"image_token_id": 290, "video_token_id": 291, "audio_token_id": 292, "boi_token_id": 293, "eoi_token_id": 294}
TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "vocab_size_per_layer_input": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def whole_model(**vision: Any) -> Any:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    numbers = tower_of(**vision).config.to_dict()
    config = Gemma4Config(text_config=TEXT, vision_config=numbers, audio_config=None, **TOKENS)
    model = Gemma4ForConditionalGeneration(config).eval()
    random_weights_(model)
    return model


def prompt(images: Grid, video: Grid = (), patches: int = 63) -> dict[str, torch.Tensor]:
    """Images of so many patches with padding, and a video whose frames are padded as images are."""
    pictures, frames = batch(images, patches), batch(video, 45, seed=2) if video else {}
    ids = [1, 5]
    for grid, token in ((images, "image_token_id"), (video, "video_token_id")):
        for _, h, w in grid:
            ids += [293, *[TOKENS[token]] * (h * w // 9), 294, 7]
    tokens = torch.tensor([ids])
    kinds = (tokens == 290).int() + 2 * (tokens == 291).int()
    made = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": kinds,
        "pixel_values": pictures["pixel_values"],
        "image_position_ids": pictures["pixel_position_ids"],
    }
    if video:
        made |= {"pixel_values_videos": frames["pixel_values"], "video_position_ids": frames["pixel_position_ids"]}
        made["num_frames_per_video"] = torch.tensor([len(video)])
    return made


@pytest.mark.parametrize("vision", [{}, {"use_clipped_linears": True, "standardize": True}], ids=str)
def test_generated_tokens(vision: dict[str, Any]) -> None:
    model = whole_model(**vision)
    inputs = prompt([(1, 6, 9), (1, 3, 6)], [(1, 3, 15)] * 3)
    if "num_frames_per_video" not in _arguments(model):
        for name in [name for name in inputs if "video" in name]:
            del inputs[name]
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == 291, 5)
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    handle = fusedvit.fuse(model, STRICT)
    assert handle.tower is model.model.vision_tower
    assert model.generate(**inputs, max_new_tokens=6, do_sample=False).equal(expected)
    stats = handle.stats()
    assert stats["fused"] == stats["calls"] >= 1 and stats["original"] == {}


def _arguments(model: Any) -> set[str]:
    return set(inspect.signature(model.model.get_video_features).parameters)


def test_the_tower_of_diffusion_gemma_is_found() -> None:
    from transformers import AutoConfig, AutoModel

    vision = tower_of().config.to_dict()
    text = {"num_hidden_layers": 1, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 16}
    config = AutoConfig.for_model("diffusion_gemma", vision_config=vision, text_config=text)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert type(fusedvit.fuse(model).tower).__name__ == NAME
