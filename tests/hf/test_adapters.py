"""PEFT's LoRA on a tower, unmerged: folded into the weights, or the original code; every change of it shows at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.bench.towers import cast_parameters_
from fusedvit.checks import fallback
from fusedvit.checks.adapters import rounded_evenly
from fusedvit.tolerance import ulp
from tests.support.families import INSTALLED, each_of, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    Grid,
    assert_different,
    assert_rule,
    assert_same,
    copy_of,
    outputs_of,
    ran_fused,
    tiny_model,
    vision_tower,
)

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

STRICT = fusedvit.FuseConfig(strict=True)
MIX: Grid = [(1, 4, 6), (1, 2, 2)]
LINEAR = r".*(qkv|attn.proj|linear_fc1)"


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Adapters that change something: PEFT's start with B = 0."""
    for i, (name, p) in enumerate(module.named_parameters()):
        if "lora_" in name:
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * seed + i))
            p.data.copy_(0.2 * drawn)


def adapted(model: Any, seed: int = 0, targets: Any = r".*visual.*(qkv|attn.proj|linear_fc\d)", **options: Any) -> Any:
    torch.manual_seed(0)
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options))
    randomise(found, seed)
    return found.requires_grad_(False).eval()


class Pair:
    """A model and its copy, fused and not, with the same adapters, and a call."""

    def __init__(self, **options: Any) -> None:
        self.model = tiny_model().requires_grad_(False)
        self.copy = copy_of(self.model)
        self.handle = fusedvit.fuse(self.model)
        self.tower, self.original = self.model.model.visual, self.copy.model.visual
        self.call = Call.of(self.tower, GRIDS["mix"])
        self.call.run(self.tower)
        self.both = adapted(self.model, **options), adapted(self.copy, **options)

    def change(self, change: Callable[[Any], Any]) -> None:
        for model in self.both:
            change(model)

    def same(self) -> dict[str, torch.Tensor]:
        ours = self.call.run(self.tower)
        assert_same(ours, self.call.run(self.original))
        return ours


@each_of(INSTALLED)
def test_every_linear_layer_and_convolution_of_every_family(name: str) -> None:
    tower = family_tower(name)
    plain = Call.of(tower, MIX).run(tower)
    targets = [path for path, m in tower.named_modules() if type(m) in (nn.Linear, nn.Conv2d, nn.Conv3d)]
    torch.manual_seed(0)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets), tower)
    randomise(tower)
    tower.requires_grad_(False).eval()
    original, call = copy_of(tower), Call.of(tower, MIX)
    handle = fusedvit.fuse(tower, STRICT)
    ours = call.run(tower)
    assert_same(ours, call.run(original))
    if "pooler_output" in plain:
        assert_different(ours, plain)
    ran_fused(handle, calls=1)


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_half_precision_by_the_rule(adapters: torch.dtype) -> None:
    """PEFT keeps adapters of a bf16 model in fp32."""
    tower = family_tower("Qwen3VLVisionModel")
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR), tower)
    randomise(tower)
    for name, p in tower.named_parameters():
        p.requires_grad_(False)
        p.data = p.data.to(adapters if "lora_" in name else torch.bfloat16)
    tower.eval()
    original, call, exact = copy_of(tower), Call.of(tower, MIX), copy_of(tower)
    cast_parameters_(exact, torch.float64)
    handle = fusedvit.fuse(tower, STRICT)
    ref = outputs_of(exact(call.pixels.double(), grid_thw=call.grid))
    assert_rule(call.run(tower), ref, call.run(original))
    ran_fused(handle, calls=1)


LARGER: Grid = [(1, 16, 16), (1, 4, 6)]
SMALL = {
    "qkv": "qkv",
    "proj": "attn.proj",
    "fc1": r"blocks.\d.mlp.linear_fc1",
    "fc2": r"blocks.\d.mlp.linear_fc2",
    "merger": r"merger.linear_fc\d",
}


def with_small_adapters(dtype: torch.dtype, targets: str, size: float) -> Any:
    """A tower in `dtype` whose adapters add up to some `size` units in the last place of a median weight, in the
    direction of the mean of what each layer gets, where training puts them: none of it averages out over K."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "out_hidden_size": 128}
    tower = vision_tower(**sizes, depth=2, deepstack_visual_indexes=[])
    cast_parameters_(tower, dtype)
    peft.inject_adapter_in_model(peft.LoraConfig(r=1, lora_alpha=1, target_modules=".*" + targets), tower)
    means: dict[Any, torch.Tensor] = {}
    found = layers(tower)
    hooks = [m.register_forward_pre_hook(lambda m, a: means.update({m: a[0].float().mean(0)})) for m in found]
    Call.of(tower, LARGER).run(tower)
    for hook, layer in zip(hooks, found, strict=True):
        hook.remove()
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        down.data = (means[layer] / means[layer].abs().mean())[None]
        up.data = size * float(ulp(layer.base_layer.weight.double().abs().median(), dtype)) * torch.randn(up.shape)
    return tower.requires_grad_(False).eval()


@pytest.mark.parametrize("size", [0.03, 0.1, 0.3, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("target", SMALL)
def test_small_adapters(target: str, dtype: torch.dtype, size: float) -> None:
    """Smaller than what rounding a weight to nearest loses: as much of them is in the answer as in the original's."""
    tower = with_small_adapters(dtype, SMALL[target], size)
    call, original, exact = Call.of(tower, LARGER), copy_of(tower), copy_of(tower)
    cast_parameters_(exact, torch.float64)
    handle = fusedvit.fuse(tower, STRICT)

    def answers() -> list[dict[str, torch.Tensor]]:
        return [call.run(tower), call.run(original), outputs_of(exact(call.pixels.double(), grid_thw=call.grid))]

    ours, theirs, ref = answers()
    assert_rule(ours, ref, theirs)
    ran_fused(handle, calls=1)
    for model in (tower, original, exact):
        for layer in layers(model):
            layer.enable_adapters(False)
    bare, _, without = answers()
    effect = ref["pooler_output"] - without["pooler_output"]
    given = ours["pooler_output"].double() - bare["pooler_output"]
    noise = (theirs["pooler_output"] - ref["pooler_output"]).norm() / effect.norm()
    seen = float((given * effect).sum() / effect.square().sum())
    assert abs(seen - 1) < 0.1 + 0.03 * noise, f"{seen:.2f} of what the adapters add"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounded_without_bias(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    kept = torch.tensor([0.0, 1.0, -2.0, info.tiny, info.smallest_normal * info.eps, 1 + info.eps, info.max, -info.max])
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    exact = torch.cat([kept, special]).double()
    torch.testing.assert_close(rounded_evenly(exact, dtype), exact.to(dtype), rtol=0, atol=0, equal_nan=True)
    for start in (1.0, 2.0 - info.eps, -1.0 - info.eps, -2.0 + info.eps, 1.5, info.tiny, 3 * info.tiny * info.eps, 0.0):
        step = ulp(torch.tensor(start).double(), dtype)
        for share in (0.01, 0.1, 0.25, 0.5, 0.9):
            exact = (start + share * step).expand(8, 1024)
            rounded = rounded_evenly(exact, dtype).double()
            assert {*rounded.unique().tolist()} == {start, start + float(step)}
            assert ((rounded - start).mean(1) / step - share).abs().max() < 0.01, (start, share)
    beyond = float(info.max + 0.4 * ulp(torch.tensor(info.max).double(), dtype))  # where to nearest it is the largest
    assert (rounded_evenly(torch.full((64,), beyond, dtype=torch.float64), dtype) == info.max).all()


@pytest.mark.parametrize("used", [True, False], ids=["called", "not called"])
def test_a_linear_patch_embedding(used: bool) -> None:
    """What loading with `fusion_config={"patch_embeddings": True}` leaves, with adapters that come, change and go."""
    from transformers.fusion_mapping import PatchEmbeddingsFusionSpec

    tower = vision_tower()
    convolution, call = tower.patch_embed.proj, Call.of(tower, MIX)
    tower.patch_embed = PatchEmbeddingsFusionSpec().make_fused_class(type(tower.patch_embed))(tower.config)
    tower.patch_embed.linear_proj.weight.data = convolution.weight.detach().flatten(1)
    tower.patch_embed.linear_proj.bias.data = convolution.bias.detach()
    handle = fusedvit.fuse(tower)
    plain = call.run(tower)
    config = peft.LoraConfig(r=4, target_modules=r".*(linear_proj|qkv)", init_lora_weights=False)
    peft.inject_adapter_in_model(config, tower)
    tower.requires_grad_(False).eval()
    if used:
        call.run(tower)

    def same() -> dict[str, torch.Tensor]:
        ours = call.run(tower)
        assert_same(ours, call.run(fusedvit.unfuse(copy_of(tower))))
        return ours

    assert_different(same(), plain)
    layer = tower.patch_embed.linear_proj
    layer.set_scale("default", 3.0)
    same()
    ran_fused(handle, calls=3 + used)
    layer.forward = lambda x: 2 * layer.base_layer(x)
    same()
    del layer.forward
    layer.lora_A["default"] = Doubled(layer)
    same()
    assert sum(handle.stats()["original"].values()) == 2


def layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]


def second(model: Any) -> None:
    torch.manual_seed(1)
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=4, target_modules=r".*visual.*(qkv|linear_fc1)"))
    randomise(model, seed=3)
    model.requires_grad_(False)


def chosen(model: Any, names: Any) -> None:
    model.base_model.set_adapter(names)
    model.requires_grad_(False)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "A in place": lambda m: layers(m)[1].lora_A["default"].weight.mul_(1.5),
    "B past its version": lambda m: layers(m)[2].lora_B["default"].weight.data.mul_(1.5),
    "A replaced": lambda m: setattr(
        layers(m)[0].lora_A["default"], "weight", nn.Parameter(torch.ones(4, 48), requires_grad=False)
    ),
    "a scale": lambda m: layers(m)[3].set_scale("default", 3.0),
    "every scale": lambda m: [layer.scale_layer(0.5) for layer in layers(m)],
    "a scale, in the dictionary": lambda m: layers(m)[0].scaling.__setitem__("default", 0.25),
    "no scale": lambda m: [layer.set_scale("default", 0.0) for layer in layers(m)],
    "switched off": lambda m: m.base_model.disable_adapter_layers(),
    "another adapter": lambda m: (second(m), chosen(m, "second")),
    "another adapter that is not used": second,
    "two adapters": lambda m: (second(m), chosen(m, ["default", "second"])),
    "no adapter": lambda m: [setattr(layer, "_active_adapter", []) for layer in layers(m)],
    "a name in the list of active ones": lambda m: (second(m), [layer.active_adapters for layer in layers(m)]),
    "merged": lambda m: m.merge_adapter(),
    "merged and unmerged": lambda m: (m.merge_adapter(), m.unmerge_adapter()),
    "merged and unloaded": lambda m: m.merge_and_unload(),
    "unloaded": lambda m: m.unload(),
    "an adapter deleted": lambda m: (second(m), chosen(m, "second"), m.delete_adapter("default")),
    "the base in place": lambda m: layers(m)[0].base_layer.weight.mul_(1.1),
    "the base past its version": lambda m: layers(m)[0].base_layer.weight.data.mul_(1.1),
    "the base's bias": lambda m: layers(m)[0].base_layer.bias.add_(0.3),
    "rank": lambda m: (
        setattr(layers(m)[0].lora_A["default"], "weight", nn.Parameter(torch.ones(7, 48), requires_grad=False)),
        setattr(layers(m)[0].lora_B["default"], "weight", nn.Parameter(torch.ones(144, 7), requires_grad=False)),
    ),
}


@pytest.mark.parametrize("used", [True, False], ids=["called", "not called"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_show_at_the_next_call(name: str, used: bool) -> None:
    pair = Pair()
    if used:
        pair.same()
    with torch.no_grad():
        pair.change(CHANGES[name])
    pair.same()
    pair.same()
    stats = pair.handle.stats()
    assert stats["fused"] == stats["calls"] == 3 + used, stats["original"]


def test_an_unchanged_tower_is_prepared_once() -> None:
    pair = Pair()
    before = pair.handle.stats()["refreshes"]
    for _ in range(3):
        pair.same()
    assert pair.handle.stats()["refreshes"] == before + 1


def test_adapters_of_all_kinds_of_options() -> None:
    for options in (
        {"use_rslora": True},
        {"lora_bias": True},
        {"lora_dropout": 0.5},
        {"bias": "all"},
        {"rank_pattern": {"qkv": 2}},
    ):
        pair = Pair(**options)
        pair.same()
        assert pair.handle.stats()["fused"] == 2, options


ORIGINAL: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "dropout in training mode": ({"lora_dropout": 0.0}, lambda m: set_dropout(m), "dropout"),
    "DoRA": ({"use_dora": True}, lambda m: None, "Dora"),
    "DoRA of a convolution": (
        {"targets": r".*visual.*patch_embed.proj", "use_dora": True},
        lambda m: None,
        "patch_embed",
    ),
    "an embedding": ({"targets": r".*visual.*pos_embed"}, lambda m: None, "pos_embed"),
    "merged and switched off": ({}, lambda m: (m.merge_adapter(), m.base_model.disable_adapter_layers()), "merged"),
    "a hook": ({}, lambda m: layers(m)[0].register_forward_hook(lambda *a: None), "blocks.0"),
    "a hook on A": (
        {},
        lambda m: layers(m)[0].lora_A["default"].register_forward_hook(lambda mod, args, out: 2 * out),
        "lora_A",
    ),
    "a forward of its own": (
        {},
        lambda m: setattr(layers(m)[0], "forward", lambda x: layers(m)[0].base_layer(x)),
        "forward",
    ),
    "dropout that begins": ({"lora_dropout": 1.0}, lambda m: layers(m)[0].lora_dropout["default"].train(), "dropout"),
    "a tensor as a scale": ({}, lambda m: layers(m)[0].scaling.update(default=torch.tensor(3.0)), "item"),
    "another A": ({}, lambda m: layers(m)[0].lora_A.__setitem__("default", Doubled(layers(m)[0])), "Linear"),
}


class Doubled(nn.Linear):
    def __init__(self, layer: Any) -> None:
        super().__init__(48, 4, bias=False)
        self.weight = layer.lora_A["default"].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def set_dropout(model: Any) -> None:
    """So much dropout that it is no dropout's luck, and yet an answer to compare with: all of it."""
    layer = layers(model)[0]
    layer.lora_dropout["default"] = nn.Dropout(1.0).train()


@pytest.mark.parametrize("used", [True, False], ids=["called", "not called"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not asked"])
@pytest.mark.parametrize("name", ORIGINAL)
def test_what_cannot_be_folded_runs_the_original_code(name: str, asked: bool, used: bool) -> None:
    options, change, word = ORIGINAL[name]
    pair = Pair(**options)
    if used:
        pair.same()
    with torch.no_grad():
        pair.change(change)
    if asked:  # which a call need not follow
        report = pair.handle.report()
        assert word in report and "original code" in report, report
        with pytest.raises(RuntimeError, match="^fusedvit: .*" + word):
            pair.handle.refresh()
    fused = pair.handle.stats()["fused"]
    pair.same()
    assert pair.handle.stats()["fused"] == fused


OTHER_KINDS: dict[str, dict[str, Any]] = {
    "DoRA": {"target_modules": LINEAR, "use_dora": True},
    "DoRA of a convolution": {"target_modules": r".*patch_embed.proj", "use_dora": True},
    "aLoRA": {"target_modules": LINEAR, "alora_invocation_tokens": [1]},
}


def test_layers_without_variants() -> None:
    """As PEFT before 0.16 makes them."""
    pair = Pair()
    for layer in layers(pair.model):
        vars(layer).pop("lora_variant", None)
    pair.same()
    ran_fused(pair.handle, calls=2)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_adapters_of_other_kinds_that_are_idle(kind: str) -> None:
    """Loaded and not active, merged, or switched off: what they would run is not run."""
    options = OTHER_KINDS[kind]
    pair = Pair(targets=options["target_modules"])
    pair.change(lambda m: m.add_adapter("other", peft.LoraConfig(r=4, **options)))
    pair.change(randomise)
    pair.same()
    pair.same()  # who changes a tower before each call soon runs its original code
    pair.change(lambda m: m.requires_grad_(False).set_adapter("other"))
    pair.change(lambda m: m.requires_grad_(False))
    pair.same()
    reason = pair.handle.reason()
    assert reason is not None and reason.kind == fallback.ADAPTER and "is of another kind than LoRA" in reason.detail
    assert pair.handle.stats()["original"] == {fallback.ADAPTER: 1}
    if kind != "aLoRA":  # which PEFT does not merge
        pair.change(lambda m: m.merge_adapter())
        pair.same()
        pair.change(lambda m: m.unmerge_adapter())
    pair.change(lambda m: m.base_model.disable_adapter_layers())
    pair.same()
    pair.change(lambda m: m.base_model.enable_adapter_layers())
    pair.change(lambda m: m.requires_grad_(False))
    pair.same()
    pair.change(lambda m: m.set_adapter("default"))
    pair.change(lambda m: m.requires_grad_(False))
    pair.same()
    assert pair.handle.reason() is None
    assert pair.handle.stats()["original"] == {fallback.ADAPTER: 2}


def weighted(model: Any, clamp: float | None) -> None:
    """Two adapters in one by a singular value decomposition; without `clamp` A is a slice of a larger matrix."""
    second(model)
    model.add_weighted_adapter(["default", "second"], [0.7, 0.3], "w", "svd", svd_rank=4, svd_clamp=clamp)
    model.set_adapter("w")
    model.requires_grad_(False)


def test_adapters_laid_out_by_columns() -> None:
    pair = Pair(targets=r".*visual.*(qkv|linear_fc1)")
    pair.change(lambda m: weighted(m, 0.999))
    down = layers(pair.tower)[0].lora_A["w"].weight
    assert down.stride() == (1, 4)
    pair.same()
    down.data.mul_(1.5), layers(pair.original)[0].lora_A["w"].weight.data.mul_(1.5)
    pair.same()
    ran_fused(pair.handle, calls=3)


@pytest.mark.parametrize(
    "of, change, said",
    [
        ("A", lambda p: nn.functional.pad(p, (0, 2))[:, :-2], "is not dense in memory (strides (50, 1))"),
        ("B", lambda p: p.repeat_interleave(2, 0)[::2], "is not dense in memory (strides (8, 1))"),
        ("B.bias", lambda p: p.repeat_interleave(2)[::2], "is not dense in memory (strides (2,))"),
        ("A", lambda p: (-p)._neg_view(), "is a negated view (strides (48, 1))"),
    ],
)
def test_adapters_with_gaps_in_memory(of: str, change: Callable[[Any], Any], said: str) -> None:
    """The message names the parameter, its layout, and what helps, which does."""
    pair = Pair(lora_bias=True)

    def parameter(model: Any) -> nn.Parameter:
        module = getattr(layers(model)[0], f"lora_{of[0]}")["default"]
        return module.bias if of.endswith("bias") else module.weight

    pair.change(lambda m: setattr(parameter(m), "data", change(parameter(m).data)))
    pair.same()
    reason = pair.handle.reason()
    name = of if of.endswith("bias") else f"{of}.weight"
    assert reason is not None and reason.kind == fallback.ADAPTER
    assert f"has lora_{name} that {said}: set its data to data.clone()" in reason.detail
    pair.change(lambda m: setattr(parameter(m), "data", parameter(m).data.clone()))
    pair.same()
    assert pair.handle.reason() is None and pair.handle.stats()["original"] == {fallback.ADAPTER: 1}


def test_svd_of_peft_as_it_leaves_it() -> None:
    pair = Pair(targets=r".*visual.*(qkv|linear_fc1)")
    pair.change(lambda m: weighted(m, None))
    pair.same()
    reason = pair.handle.reason()
    assert reason is not None and "lora_A.weight that is not dense in memory (strides (1, 48))" in reason.detail
    for model in pair.both:
        for layer in layers(model):
            for p in (layer.lora_A["w"].weight, layer.lora_B["w"].weight):
                p.data = p.data.clone()
    pair.same()
    assert pair.handle.reason() is None


@pytest.mark.parametrize("used", [True, False], ids=["called", "not called"])
def test_a_class_that_only_adapters_run_replaced(used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for dropout in a LoRA layer that has none."""
    pair = Pair()
    if used:
        pair.same()
    monkeypatch.setattr(nn.Identity, "forward", lambda self, x: 2 * x)
    pair.same()
    assert pair.handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "OFTConfig"])
def test_other_adapters_run_the_original_code(kind: str) -> None:
    options = {"feedforward_modules": []} if kind == "IA3Config" else {}
    pair_of_models = [tiny_model().requires_grad_(False) for _ in range(2)]
    towers = [m.model.visual for m in pair_of_models]
    handle = fusedvit.fuse(pair_of_models[0])
    call = Call.of(towers[0], GRIDS["mix"])
    call.run(towers[0])
    for model in pair_of_models:
        torch.manual_seed(0)
        config = getattr(peft, kind)(target_modules=r".*visual.*qkv", **options)
        wrapped = peft.get_peft_model(model, config).requires_grad_(False).eval()
        for i, (name, p) in enumerate(wrapped.named_parameters()):
            if any(part in name for part in ("ia3_", "hada_", "oft_")):
                p.data.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    assert_same(call.run(towers[0]), call.run(towers[1]))
    assert handle.stats()["original"] == {fallback.ADAPTER: 1} and "qkv" in handle.report()


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "LoKrConfig", "VeraConfig", "HRAConfig", "LoraConfig"])
def test_other_adapters_run_fused_once_they_are_unloaded(kind: str) -> None:
    """Not before: merged and switched off they stay in the tower. DoRA is a LoRA layer, and runs fused in both."""
    options = {"IA3Config": {"feedforward_modules": []}, "LoraConfig": {"use_dora": True}}.get(kind, {})
    for leaves, ends in (("merge_adapter", "merge_and_unload"), ("disable_adapter_layers", "unload")):
        model = tiny_model().requires_grad_(False)
        handle, tower = fusedvit.fuse(model), model.model.visual
        config = getattr(peft, kind)(target_modules=r".*visual.*qkv", **options)
        wrapped = peft.get_peft_model(model, config).requires_grad_(False).eval()
        getattr(wrapped.base_model, leaves)()
        call = Call.of(tower, GRIDS["mix"])
        merged = call.run(tower)
        stays = kind != "LoraConfig"
        assert handle.stats()["original"] == ({fallback.ADAPTER: 1} if stays else {})
        assert not stays or "merge_and_unload() any other adapter" in handle.report()
        getattr(wrapped.base_model, ends)()
        assert_same(call.run(tower), merged)
        assert handle.reason() is None and handle.stats()["fused"] == (1 if stays else 2)


def test_gradients_of_adapters() -> None:
    pair = Pair()
    for model in pair.both:
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name)
    gradients = []
    for tower in (pair.tower, pair.original):
        tower(pair.call.pixels, grid_thw=pair.call.grid).pooler_output.square().sum().backward()
        gradients.append([p.grad for p in tower.parameters() if p.grad is not None])
    assert gradients[0] and all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert pair.handle.stats()["original"] == {fallback.GRADIENTS: 1}
    pair.same()  # without gradients
    assert pair.handle.stats()["fused"] == 2


def test_training_steps_show() -> None:
    pair = Pair()
    for model in pair.both:
        parameters = [p.requires_grad_() for name, p in model.named_parameters() if "lora_" in name]
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        tower = model.base_model.model.model.visual
        tower(pair.call.pixels, grid_thw=pair.call.grid).pooler_output.square().mean().backward()
        optimizer.step()
    pair.same()
    assert pair.handle.stats()["fused"] == 2


def test_the_mixed_batch_of_peft_runs_the_original_code() -> None:
    pair = Pair()
    handle = pair.handle
    with torch.no_grad():
        found = [m.base_model.model.model.visual for m in pair.both]
        hooks = [
            layer.register_forward_pre_hook(lambda mod, args, kwargs: (args, kwargs), with_kwargs=True)
            for tower in found
            for layer in layers(tower)
        ]
    pair.same()
    assert handle.stats()["original"] == {fallback.HOOKS: 1}
    for hook in hooks:
        hook.remove()
    pair.same()
    assert handle.stats()["fused"] == 2


HIDDEN = {  # what a LoRA layer's forward calls or reads -> what stands there instead
    "merged": property(lambda self: True),
    "disable_adapters": property(lambda self: True),
    "active_adapter": property(lambda self: []),
    "active_adapters": property(lambda self: []),
    "_cast_input_dtype": lambda self, x, dtype: 1.5 * x,
    "_check_forward_args": lambda self, x, *arguments, **named: x.mul_(1.5),
}


@pytest.mark.parametrize("used", [True, False], ids=["called", "not called"])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_peft_runs_replaced_on_its_class(name: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    if used:
        pair.same()
    monkeypatch.setattr(peft.tuners.tuners_utils.BaseTunerLayer, name, HIDDEN[name], raising=False)
    monkeypatch.setattr(peft.tuners.lora.layer.LoraLayer, name, HIDDEN[name], raising=False)
    assert name in pair.handle.report()
    pair.same()
    assert pair.handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}


@pytest.mark.parametrize("used", [True, False], ids=["called", "not called"])
@pytest.mark.parametrize("name", [name for name, value in HIDDEN.items() if not isinstance(value, property)])
def test_methods_of_peft_on_an_instance(name: str, used: bool) -> None:
    pair = Pair()
    if used:
        pair.same()
    pair.change(lambda m: setattr(layers(m)[0], name, HIDDEN[name].__get__(layers(m)[0])))
    pair.same()
    assert pair.handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}
    assert f"{name} of the instance" in pair.handle.report()


@pytest.mark.parametrize("used", [True, False], ids=["called", "not called"])
@pytest.mark.parametrize("where", ["layer", "A"])
@pytest.mark.parametrize("name", ["_call_impl", "_compiled_call_impl"])
def test_the_call_of_a_lora_layer(name: str, where: str, used: bool) -> None:
    pair = Pair()
    if used:
        pair.same()

    def change(model: Any) -> None:
        module = layers(model)[0] if where == "layer" else layers(model)[0].lora_A["default"]
        call = module._call_impl
        setattr(module, name, lambda *arguments: 1.5 * call(*arguments))

    pair.change(change)
    pair.same()
    assert pair.handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}
