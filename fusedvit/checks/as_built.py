"""What a tower's modules and parameters must be for the fused encoder to stand for them."""

from collections.abc import Callable
from math import prod

from torch import nn

from fusedvit.families.base import Family
from fusedvit.model.param_names import DownsampleNames, LastNormNames, parameter_shapes
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


def is_as_built(tower: nn.Module, family: Family, spec: VisionSpec) -> bool:
    """Whether `tower` is, module by module and parameter by parameter, what `spec` says of it."""
    found = {family.aliases.get(n, n): tuple(p.shape) for n, p in tower.named_parameters(remove_duplicate=False)}
    if {n: _flat(shape) for n, shape in found.items()} != dict(parameter_shapes(family.names, spec)):
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
