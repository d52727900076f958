"""Tiny models of every supported family, with weights that nothing gets right by luck, and inputs for them."""

import copy
import importlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import fusedvit
from fusedvit.bench.towers import call_tower, cast_parameters_, random_weights_
from fusedvit.model.items import Item
from fusedvit.tolerance import compare

KINDS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
DEEPSTACK_KINDS = KINDS[:2]
IMAGE, VIDEO, VISION_START, VISION_END, VOCABULARY = 290, 291, 292, 293, 300

Grid = Sequence[tuple[int, int, int]]

# What a layout can go wrong on: one merged token, one row or column of them, h != w, frames, several items.
GRIDS: dict[str, Grid] = {
    "smallest": [(1, 2, 2)],
    "one row": [(1, 2, 14)],
    "one column": [(1, 14, 2)],
    "wider than the position table": [(1, 10, 12)],
    "video": [(3, 4, 6)],
    "images": [(1, 4, 6), (1, 6, 4), (1, 2, 2)],
    "mix": [(1, 8, 4), (3, 4, 6), (1, 2, 10), (2, 2, 2)],
}

_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 70,  # rows of 280 bytes: no multiple of 16
    "num_heads": 2,  # heads of 24: no power of two
    "patch_size": 4,
    "out_hidden_size": 40,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LINEAR_ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TEXT_OF = {
    "qwen3_vl": {},
    "qwen3_vl_moe": {**_EXPERTS, "decoder_sparse_step": 1},
    "qwen3_5": _LINEAR_ATTENTION,
    "qwen3_5_moe": {**_LINEAR_ATTENTION, **_EXPERTS, "shared_expert_intermediate_size": 32},
}
_PREFIX = {"qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}


def tiny_model(kind: str = "qwen3_vl", seed: int = 0, **vision: Any) -> Any:
    """A whole model `...ForConditionalGeneration` in fp32, random weights; `vision` overrides its tower's config."""
    numbers = _VISION | vision
    if kind not in DEEPSTACK_KINDS:
        numbers = {key: value for key, value in numbers.items() if key != "deepstack_visual_indexes"}
    config = getattr(transformers, f"{_PREFIX[kind]}Config")(
        text_config=TEXT | _TEXT_OF[kind],
        vision_config=numbers,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    model = getattr(transformers, f"{_PREFIX[kind]}ForConditionalGeneration")(config).eval()
    random_weights_(model, seed)
    return model


def tiny_tower(kind: str = "qwen3_vl", seed: int = 0, **vision: Any) -> Any:
    """The vision tower alone, frozen, in fp32, random weights."""
    return tiny_model(kind, seed, **vision).model.visual.requires_grad_(False)


def vision_tower(seed: int = 0, **vision: Any) -> Any:
    """A Qwen3-VL tower of any size (`vision` overrides the tiny numbers), frozen, in fp32, without a language model."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    tower = Qwen3VLVisionModel(Qwen3VLVisionConfig(**(_VISION | vision))).eval().requires_grad_(False)
    random_weights_(tower, seed)
    return tower


def copy_of(module: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """An independent copy; with `dtype`, its parameters cast as loading a checkpoint in that dtype would."""
    other = copy.deepcopy(module)
    if dtype is not None:
        cast_parameters_(other, dtype)
    return other


def items_of(grid: Grid) -> list[Item]:
    return [Item(*row) for row in grid]


def patches_of(grid: Grid) -> int:
    return sum(item.tokens for item in items_of(grid))


def random_grid(seed: int, least: int, most: int, longest: int = 40) -> Grid:
    """Images and videos of `least` to `most` patches in all, sides even and up to `longest`."""
    draw = random.Random(seed)
    while True:
        grid = []
        while patches_of(grid) < most and len(grid) < 8:
            if grid and draw.random() < 0.2 and patches_of(grid) >= least:
                break
            t = draw.choice([1, 1, 1, 2, 3, 5])
            grid.append((t, 2 * draw.randint(1, longest // 2), 2 * draw.randint(1, longest // 2)))
        if least <= patches_of(grid) <= most:
            return grid


def pixels_for(tower: Any, grid: Grid, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[patches, patch width]` on the CPU, scaled as normalised images are."""
    c = tower.config
    width = getattr(c, "in_channels", 3) * getattr(c, "temporal_patch_size", 1) * c.patch_size**2
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(patches_of(grid), width, generator=generator).to(dtype)


@dataclass(frozen=True)
class Call:
    """One input of a tower."""

    pixels: torch.Tensor
    grid: torch.Tensor

    @staticmethod
    def of(tower: Any, grid: Grid, seed: int = 1) -> "Call":
        """Random pixels in the tower's dtype, where the tower is."""
        parameter = next(tower.parameters())
        pixels = pixels_for(tower, grid, seed, parameter.dtype).to(parameter.device)
        return Call(pixels, torch.tensor(grid, dtype=torch.int64, device=parameter.device).reshape(len(grid), 3))

    def run(self, tower: Any, **arguments: Any) -> dict[str, torch.Tensor]:
        """The tower's outputs by name, without gradients."""
        with torch.no_grad():
            return outputs_of(self.record(tower, **arguments))

    def record(self, tower: Any, **arguments: Any) -> Any:
        """The tower's record."""
        return call_tower(tower, self.pixels, self.grid, **arguments)


def fused_tower(tower: Any = None, grid: Grid = GRIDS["mix"], config: Any = None) -> tuple[Any, Any, Call]:
    """`tower`, or a tiny one, fused; its handle; a call of it."""
    tower = tiny_tower() if tower is None else tower
    call = Call.of(tower, grid)
    return tower, fusedvit.fuse(tower, config), call


def fused_and_original(tower: Any = None, grid: Grid = GRIDS["mix"], config: Any = None) -> tuple[Any, Any, Call, Any]:
    """As `fused_tower`, and the tower's copy from before it was fused."""
    tower = tiny_tower() if tower is None else tower
    original = copy_of(tower)
    return *fused_tower(tower, grid, config), original


def outputs_of(answer: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a tower's output record, by name; fields of several tensors give one entry each."""
    found: dict[str, torch.Tensor] = {}
    for name, value in answer.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        else:
            found |= {f"{name}[{i}]": tensor for i, tensor in enumerate(value)}
    return found


def error_of(ours: torch.Tensor, ref: torch.Tensor) -> float:
    """Relative error in the 2-norm."""
    norm = ref.double().norm()
    return float((ours.double() - ref.double()).norm() / norm) if norm else float(ours.double().norm())


def assert_same(ours: Mapping[str, torch.Tensor], ref: Mapping[str, torch.Tensor], limit: float = 1e-5) -> None:
    """Same fields, shapes, dtypes; relative errors up to `limit`. In fp32 the tiny towers differ by some 1e-6."""
    assert ours.keys() == ref.keys(), f"fields {sorted(ours)}, expected {sorted(ref)}"
    for name, expected in ref.items():
        got = ours[name]
        assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device), name
        error = error_of(got, expected)
        assert error <= limit, f"{name}: relative error {error:.3g}, at most {limit:g}"


def outcome(act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a call gives, or the error that it raises."""
    try:
        return act(*arguments, **named)
    except Exception as error:  # whatever it is, what is compared with it must raise it too
        return error


def fused_when(tower: Any, when: str, change: Callable[[], object], call: Call) -> Any:
    """The handle of `tower`, which is changed "before fuse", "after fuse" or "after a call"."""
    if when == "before fuse":
        change()
    handle = fusedvit.fuse(tower)
    if when == "after a call":
        call.run(tower)
    if when != "before fuse":
        change()
    return handle


def expected_of(tower: Any, call: Call) -> dict[str, torch.Tensor]:
    """What the original tower answers with the weights that a fused one has now."""
    return call.run(fusedvit.unfuse(copy_of(tower)))


def storages_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """What tells whether their memory is there still, and does not keep it."""
    return [t.untyped_storage()._weak_ref() for t in tensors]


def poison(encoder: Any) -> None:
    """NaN into every float of the static buffers of a captured encoder."""
    for name, tensor in encoder.whole().tensors().items():
        if tensor.is_floating_point() and not name.startswith("scratch"):
            tensor.fill_(float("nan"))


def modeling() -> Any:
    """transformers' module of Qwen3-VL."""
    return importlib.import_module("transformers.models.qwen3_vl.modeling_qwen3_vl")


def twisted(value: Any) -> Any:
    """Other numbers, wherever there are some."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value * 1.5
    if type(value) is tuple:
        return tuple(map(twisted, value))
    if isinstance(value, dict):
        for name in value:
            value[name] = twisted(value[name])
    return value


def in_place_of(owner: Any, name: str, replace: Callable[[Any], Any]) -> Any:
    """A context in which `owner` has under `name` what `replace` makes of what it had."""
    return mock.patch.object(owner, name, replace(getattr(owner, name, None)), create=name not in vars(owner))


def reversed_blocks(self: Any) -> Any:
    return iter([*self._modules.values()][::-1])


def assert_alike(ours: Any, theirs: Any) -> None:
    """Two outcomes: the same answer, or errors of the same type."""
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        assert type(ours) is type(theirs), f"{ours!r}, expected {theirs!r}"
    else:
        assert_same(ours, theirs)


def differs(plain: Mapping[str, torch.Tensor], other: Any) -> bool:
    """Whether an outcome is another one than `plain`."""
    if isinstance(other, Exception) or plain.keys() != other.keys():
        return True
    return any(t.shape != other[name].shape or error_of(t, other[name]) > 1e-5 for name, t in plain.items())


def assert_rule(
    ours: Mapping[str, torch.Tensor], ref: Mapping[str, torch.Tensor], pt: Mapping[str, torch.Tensor], what: str = ""
) -> None:
    """The tolerance rule for every field: `ours` against `ref`, with Hugging Face's answer `pt` as the yardstick."""
    assert ours.keys() == ref.keys() == pt.keys()
    for name in ref:
        verdict = compare(ours[name], ref[name], pt[name])
        assert verdict.passed, f"{what} {name}: {verdict.reason}"


def assert_different(ours: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], limit: float = 1e-3) -> None:
    """The guard of tests on changes: a change that changes nothing shows nothing."""
    assert error_of(ours["pooler_output"], other["pooler_output"]) > limit, "nothing changed: the test shows nothing"


def assert_bitwise(ours: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """The same fields and bits, NaN included."""
    assert ours.keys() == other.keys()
    for name, expected in other.items():
        assert bits(ours[name]).equal(bits(expected)), f"{name} differs"


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(torch.uint8)


def ran_fused(handle: Any, calls: int) -> None:
    """Every one of exactly `calls` calls ran fused."""
    stats = handle.stats()
    got = stats["calls"], stats["fused"], stats["original"]
    assert got == (calls, calls, {}), f"calls, fused, original: {got}; expected {calls} fused calls"


def ran_original(handle: Any, reason: str, calls: int = 1) -> None:
    """Exactly `calls` calls took the original code, all for `reason`."""
    assert handle.stats()["original"] == {reason: calls}


def precomputed(tower: Any, call: Call) -> dict[str, Any]:
    """What transformers.vision_utils would compute within the call; with it the tower can be traced as one graph."""
    from transformers import vision_utils

    index, weight = vision_utils.get_vision_interpolation_indices_and_weights(
        call.grid,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.config.spatial_merge_size,
        kwargs={},
    )
    ends, longest = vision_utils.get_vision_attention_seqlens(call.grid, tower.config, kwargs={})
    return {
        "cu_seqlens": ends,
        "max_seqlen": 32 if longest is None else longest,
        "position_ids": vision_utils.get_vision_position_ids(call.grid, tower.config.spatial_merge_size, kwargs={}),
        "interp_indices": index,
        "interp_weights": weight,
    }


def prompt(
    tower: Any, images: Grid = (), videos: Grid = (), seed: int = 1, by_frame: bool = True
) -> dict[str, torch.Tensor]:
    """Arguments of `generate` for one sequence: some text, the images, the videos (a placeholder run per frame)."""
    merge = tower.config.spatial_merge_size**2
    tokens = [5, 6]
    for _, h, w in images:
        tokens += [VISION_START, *[IMAGE] * (h * w // merge), VISION_END]
    for t, h, w in videos:
        runs = t if by_frame else 1
        for frame in range(runs):
            tokens += [20 + frame, VISION_START, *[VIDEO] * (t * h * w // merge // runs), VISION_END]
    ids = torch.tensor([[*tokens, 7, 8]])
    made = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
    }
    if images:
        made |= {"pixel_values": pixels_for(tower, images, seed), "image_grid_thw": torch.tensor(images)}
    if videos:
        made |= {"pixel_values_videos": pixels_for(tower, videos, seed + 1), "video_grid_thw": torch.tensor(videos)}
    return made


def batch_of(prompts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Several prompts as one batch, padded on the left, their media one after the other."""
    longest = max(p["input_ids"].shape[1] for p in prompts)
    made: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for p in prompts for name in p):
        parts = [p[name] for p in prompts if name in p]
        if parts[0].shape[0] == 1 and name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            parts = [nn.functional.pad(part, (longest - part.shape[1], 0)) for part in parts]
        made[name] = torch.cat(parts)
    return made
