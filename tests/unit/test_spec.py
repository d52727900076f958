"""Specs, and what families make of Hugging Face's configs."""

import dataclasses
import inspect
from typing import Any

import pytest
import transformers

import fusedvit
from fusedvit.families.registry import FAMILIES, family_of
from fusedvit.model.spec import ACTIVATIONS, VisionSpec
from tests.support.towers import DEEPSTACK_KINDS, KINDS, tiny_tower, vision_tower

GOOD: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "head_dim": 72,
    "intermediate_size": 4304,
    "out_size": 4096,
    "patch_size": 16,
    "position_side": 48,
    "deepstack": (8, 16, 24),
}

# Released checkpoints: depth, hidden, heads, head size, intermediate, out, deepstack.
RELEASED = {
    "Qwen3-VL-4B": (24, 1024, 16, 64, 4096, 2560, (5, 11, 17)),
    "Qwen3-VL-8B": (27, 1152, 16, 72, 4304, 4096, (8, 16, 24)),
    "Qwen3-VL-32B": (27, 1152, 16, 72, 4304, 5120, (8, 16, 24)),
    "Qwen3.5-0.8B": (12, 768, 12, 64, 3072, 1024, ()),
    "Qwen3.5-9B": (27, 1152, 16, 72, 4304, 4096, ()),
}


def test_derived_numbers() -> None:
    spec = VisionSpec(**GOOD)
    assert (spec.patch_width, spec.merge_unit, spec.merged_size) == (1536, 4, 4608)


def test_spec_is_frozen_and_comparable() -> None:
    spec = VisionSpec(**GOOD)
    assert spec == VisionSpec(**GOOD) and hash(spec) == hash(VisionSpec(**GOOD))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.depth = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head_dim": 64}, r"num_heads \* head_dim, got 1152 and 16 \* 64"),
        ({"hidden_size": 1120, "head_dim": 70}, "head_dim must be a multiple of 4 .*got 70"),
        ({"activation": "silu"}, "activation must be one of .*got 'silu'"),
        ({"deepstack": (27,)}, r"distinct blocks of 0..26, got \[27\]"),
        ({"deepstack": (-1,)}, r"distinct blocks of 0..26, got \[-1\]"),
        ({"deepstack": (8, 8)}, r"distinct blocks of 0..26, got \[8, 8\]"),
        ({"depth": -1}, "depth must be at least 1, got -1"),
        ({"patch_size": 0}, "patch_size must be at least 1, got 0"),
        ({"window": -1}, "window must be at least 0, got -1"),
        ({"norm_eps": float("nan")}, "norm_eps must be at least 0, got nan"),
        ({"sandwich": True, "norm": "rms"}, "sandwich needs qk_norm"),
        ({"v_norm": True}, "v_norm needs qk_norm"),
        ({"kv_heads": 3}, "num_heads must be a multiple of kv_heads, got 16 and 3"),
        ({"without_bias": ("nope",)}, r"without_bias must be of .*got \['nope'\]"),
    ],
)
def test_impossible_numbers(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^fusedvit: .*{message}"):
        VisionSpec(**(GOOD | change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"depth": 2.0}, "depth must be an int, got 2.0"),
        ({"depth": True}, "depth must be an int, got True"),
        ({"norm_eps": "1e-6"}, "norm_eps must be a number, got '1e-6'"),
        ({"qk_norm": 1}, "qk_norm must be True or False, got 1"),
        ({"tail": None}, "tail must be a str, got None"),
        ({"deepstack": [8]}, r"deepstack must be a tuple of ints, got \[8\]"),
        ({"without_bias": "qkv"}, "without_bias must be a tuple of strs, got 'qkv'"),
    ],
)
def test_fields_of_another_type(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^fusedvit: {message}$"):
        VisionSpec(**(GOOD | change))


def test_public_names() -> None:
    assert fusedvit.VisionSpec is VisionSpec
    assert set(fusedvit.__all__) <= set(dir(fusedvit)) | {"__version__"}
    assert all(getattr(fusedvit, name) is not None for name in fusedvit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fuze'"):
        _ = fusedvit.fuze
    assert fusedvit.FuseConfig() == fusedvit.FuseConfig(strict=False, watch_data=True)


# families


@pytest.mark.parametrize("kind", KINDS)
def test_spec_of_a_config(kind: str) -> None:
    tower = tiny_tower(kind)
    family = family_of(type(tower).__name__)
    assert family is not None
    assert family.spec_from_config(tower.config) == VisionSpec(
        depth=3,
        hidden_size=48,
        num_heads=2,
        head_dim=24,
        intermediate_size=70,
        out_size=40,
        patch_size=4,
        position_side=6,
        deepstack=(0, 1) if kind in DEEPSTACK_KINDS else (),
    )
    record = getattr(inspect.getmodule(type(tower)), family.output_class)
    assert hasattr(record, "deepstack_features") == (kind in DEEPSTACK_KINDS)


@pytest.mark.parametrize("name", RELEASED)
def test_released_checkpoints(name: str) -> None:
    depth, hidden, heads, head_dim, inner, out, deepstack = RELEASED[name]
    numbers = {
        "depth": depth,
        "hidden_size": hidden,
        "num_heads": heads,
        "intermediate_size": inner,
        "out_hidden_size": out,
        "num_position_embeddings": 2304,
        "patch_size": 16,
    }
    prefix, family_name = ("Qwen3VL", "Qwen3-VL") if deepstack else ("Qwen3_5", "Qwen3.5, Qwen3.6, Qwen3.8, Qwen4-Exp")
    if deepstack:
        numbers["deepstack_visual_indexes"] = list(deepstack)
    config = getattr(transformers, f"{prefix}VisionConfig")(**numbers)
    family = next(f for f in FAMILIES if f.name == family_name)
    spec = family.spec_from_config(config)
    assert spec == VisionSpec(
        depth, hidden, heads, head_dim, inner, out, patch_size=16, position_side=48, deepstack=deepstack
    )


def test_defaults_agree_with_hugging_faces() -> None:
    """The epsilon is written into their modules, the base of the rotary frequencies into their config's defaults."""
    tower = vision_tower()
    family = family_of(type(tower).__name__)
    assert family is not None
    spec = family.spec_from_config(tower.config)
    assert {module.eps for module in tower.modules() if hasattr(module, "eps")} == {spec.norm_eps}
    assert tower.config.rope_parameters["rope_theta"] == spec.rope_theta


def test_rotary_base_of_the_config_is_taken() -> None:
    tower = vision_tower(rope_parameters={"rope_type": "axial", "rope_theta": 500.0})
    family = family_of(type(tower).__name__)
    assert family is not None and family.spec_from_config(tower.config).rope_theta == 500.0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_position_embeddings": 35}, "square number, got 35"),
        ({"hidden_act": "silu"}, "hidden_act must be one of .*got 'silu'"),
        ({"hidden_size": 50}, "num_heads|head_dim"),
    ],
)
def test_configs_that_cannot_be(change: dict[str, Any], message: str) -> None:
    config = tiny_tower().config
    for name, value in change.items():
        setattr(config, name, value)
    family = family_of("Qwen3VLVisionModel")
    assert family is not None
    with pytest.raises(ValueError, match=message):
        family.spec_from_config(config)


def test_registry() -> None:
    classes = [name for family in FAMILIES for name in family.class_names]
    assert len(set(classes)) == len(classes)
    assert family_of("Qwen2Model") is None
    assert {"gelu_tanh", "gelu", "quick_gelu", "swiglu", "geglu_tanh"} == set(ACTIVATIONS)
