"""What a tower's modules and parameters must be for the fused encoder to stand for them."""

from collections.abc import Callable, Iterator
from math import prod

from torch import nn

from fusedvit.families.base import Family
from fusedvit.model.param_names import DownsampleNames, LastNormNames, MergerNames
from fusedvit.model.spec import VisionSpec

# Modules without parameters that repeat a known function, by our names of it.
_ACTIVATIONS = {
    "gelu_tanh": "GELUTanh",
    "gelu": "GELUActivation",
    "quick_gelu": "QuickGELUActivation",
    "swiglu": "SiLUActivation",
}
_LEAVES = (nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Conv3d, nn.Embedding)
_FUSED_PATCH_EMBED = "transformers.fusion_mapping"  # see Family.aliases
_ATTRIBUTES = ("deepstack_visual_indexes", "spatial_merge_size", "num_grid_per_side", "window_size")
_FULL_ATTENTION = "fullatt_block_indexes"
_NUMBERS = ("eps", "variance_epsilon", "swiglu_limit")
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def is_as_built(tower: nn.Module, family: Family, spec: VisionSpec) -> bool:
    """Whether `tower` is, module by module and parameter by parameter, what `spec` says of it."""
    found = {family.aliases.get(n, n): tuple(p.shape) for n, p in tower.named_parameters(remove_duplicate=False)}
    if {n: _flat(shape) for n, shape in found.items()} != dict(shapes_of(family, spec)):
        return False
    if attributes_of(tower) != _attributes(tower, spec):
        return False
    acts, numbers = _activation_paths(family, spec), _numbers(family, spec)
    inner = [(name, module) for name, module in tower.named_modules(remove_duplicate=False) if name]
    return all(
        _is_plain(module, tower, acts.get(name)) and numbers_of(module).items() <= numbers(name).items()
        for name, module in inner
    )


def numbers_of(module: nn.Module) -> dict[str, float]:
    """Numbers that a module's forward goes by: a norm's epsilon, a gated MLP's limit."""
    return {name: vars(module)[name] for name in _NUMBERS if name in vars(module)}


def _numbers(family: Family, spec: VisionSpec) -> Callable[[str], dict[str, float]]:
    """What these numbers must be, by a module's name."""
    merger = family.names.merger
    everywhere = {"eps": spec.norm_eps, "variance_epsilon": spec.norm_eps, "swiglu_limit": spec.glu_limit}
    odd = {merger.proj_norm: {"eps": spec.merger_eps}} if isinstance(merger, DownsampleNames) else {}
    return lambda name: odd.get(name, everywhere)


def attributes_of(tower: nn.Module) -> dict[str, object]:
    """What a tower's forward goes by beside its modules, copied."""
    kept = {name: getattr(tower, name) for name in _ATTRIBUTES if hasattr(tower, name)}
    if hasattr(tower, _FULL_ATTENTION):
        depth = sum(1 for _ in tower.get_submodule("blocks").children())
        kept[_FULL_ATTENTION] = sorted(set(getattr(tower, _FULL_ATTENTION)) & set(range(depth)))
    return {name: list(value) if isinstance(value, list | tuple) else value for name, value in kept.items()}


def _attributes(tower: nn.Module, spec: VisionSpec) -> dict[str, object]:
    values = {
        "deepstack_visual_indexes": list(spec.deepstack),
        "spatial_merge_size": spec.merge_size,
        "num_grid_per_side": spec.position_side,
        "window_size": spec.window * spec.merge_size * spec.patch_size,
        _FULL_ATTENTION: list(spec.full_attention),
    }
    return {name: value for name, value in values.items() if hasattr(tower, name)}


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The patch embedding's convolution as the product that it is."""
    return shape if len(shape) != 5 else (shape[0], prod(shape[1:]))


def shapes_of(family: Family, spec: VisionSpec) -> Shapes:
    """Every parameter's name and shape; the patch embedding's `[hidden, patch_width]`."""
    names, c = family.names, spec.hidden_size
    yield from _linear(names.patch, c, spec.patch_width, "patch" not in spec.without_bias)
    if spec.position_side:
        yield f"{names.position}.weight", (spec.position_side**2, c)
    if spec.patch_norm:
        yield from _norm(f"{names.patch_norm}", c, spec.norm)
    for i in range(spec.depth):
        for name, shape in _block_shapes(family, spec):
            yield name.format(i), shape
    if isinstance(names.merger, DownsampleNames):
        yield from _downsample_shapes(names.merger, spec)
    elif isinstance(names.merger, LastNormNames):
        yield from _norm(names.merger.norm, c, spec.norm)
    else:
        yield from _merger_shapes(names.merger, spec, c)
    for i in range(len(spec.deepstack)):
        assert names.deepstack is not None, "deepstack blocks and no deepstack mergers"
        yield from _merger_shapes(names.deepstack.at(i), spec, spec.merged_size)


def _block_shapes(family: Family, spec: VisionSpec) -> Shapes:
    names, c, inner = family.names, spec.hidden_size, spec.intermediate_size
    kv = (spec.kv_heads or spec.num_heads) * spec.head_dim
    qkv = (c + 2 * kv,) if len(names.qkv) == 1 else (c, kv, kv)
    bias = {part: part not in spec.without_bias for part in ("qkv", "proj", "mlp")}
    yield from _norm(names.norm1, c, spec.norm)
    for name, rows in zip(names.qkv, qkv, strict=True):
        yield from _linear(name, rows, c, bias["qkv"])
    for name in names.qk_norm:
        yield from _norm(name, spec.head_dim, "rms")
    yield from _linear(names.proj, c, c, bias["proj"])
    yield from _norm(names.norm2, c, spec.norm)
    for name in names.fc1:
        yield from _linear(name, inner, c, bias["mlp"])
    yield from _linear(names.fc2, c, inner, bias["mlp"])


def _merger_shapes(m: MergerNames, spec: VisionSpec, width: int) -> Shapes:
    yield from _norm(m.norm, width, spec.norm)
    yield from _linear(m.fc1, spec.merged_size, spec.merged_size, True)
    yield from _linear(m.fc2, spec.out_size, spec.merged_size, True)


def _downsample_shapes(m: DownsampleNames, spec: VisionSpec) -> Shapes:
    out, bias = spec.out_size, "merger" not in spec.without_bias
    yield from _norm(m.norm, spec.hidden_size, spec.norm)
    yield f"{m.downsample}.weight", (out, spec.hidden_size, spec.merge_size, spec.merge_size)
    yield f"{m.downsample}.bias", (out,)
    yield from _linear(m.proj, out, out, bias)
    yield from _norm(m.proj_norm, out, "layer")
    for name in m.fc1:
        yield from _linear(name, spec.merger_size, out, bias)
    yield from _linear(m.fc2, out, spec.merger_size, bias)


def _linear(name: str, out: int, cols: int, bias: bool) -> Shapes:
    yield f"{name}.weight", (out, cols)
    if bias:
        yield f"{name}.bias", (out,)


def _norm(name: str, width: int, kind: str) -> Shapes:
    yield f"{name}.weight", (width,)
    if kind == "layer":
        yield f"{name}.bias", (width,)


def _activation_paths(family: Family, spec: VisionSpec) -> dict[str, str]:
    """Where activations hang, and the class that must be there."""
    names = family.names
    paths = {names.act.format(i): _ACTIVATIONS[spec.activation] for i in range(spec.depth)}
    if isinstance(names.merger, DownsampleNames):
        return paths | {names.merger.proj_act: "GELU", names.merger.act: _ACTIVATIONS["swiglu"]}
    if isinstance(names.merger, LastNormNames):
        return paths
    deepstack = [names.deepstack.at(i).act for i in range(len(spec.deepstack))] if names.deepstack else []
    return paths | dict.fromkeys([names.merger.act, *deepstack], "GELU")


def _is_plain(module: nn.Module, tower: nn.Module, activation: str | None) -> bool:
    own = [p for p in module._parameters.values() if p is not None]
    if "forward" in module.__dict__ or any(type(p) is not nn.Parameter for p in own):
        return False
    cls = type(module)
    if activation is not None:
        exact = cls.__name__ == activation and cls.__module__.startswith(("torch.nn.", "transformers.activations"))
        return exact and getattr(module, "approximate", "none") == "none"
    if cls in _LEAVES:
        return True
    if cls in (nn.ModuleList, nn.Sequential):
        return not module._parameters
    theirs = cls.__module__ == type(tower).__module__ and cls.__name__.endswith("RMSNorm")
    return theirs or (not own and cls.__module__ in (type(tower).__module__, _FUSED_PATCH_EMBED))
