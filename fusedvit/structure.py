"""What a tower's modules and parameters must be for the fused encoder to stand for them."""

from collections.abc import Iterator

from torch import nn

from fusedvit.families.record import Family
from fusedvit.spec import VisionSpec
from fusedvit.weights import MergerNames

# Modules without parameters that repeat a known function, by our names of it.
_ACTIVATIONS = {"gelu_tanh": "GELUTanh", "gelu": "GELUActivation", "quick_gelu": "QuickGELUActivation"}
_LEAVES = (nn.Linear, nn.LayerNorm, nn.Conv3d, nn.Embedding)
_FUSED_PATCH_EMBED = "transformers.fusion_mapping"  # see Family.aliases
_ATTRIBUTES = ("deepstack_visual_indexes", "spatial_merge_size", "num_grid_per_side")


def is_as_built(tower: nn.Module, family: Family, spec: VisionSpec) -> bool:
    """Whether `tower` is, module by module and parameter by parameter, what `spec` says of it."""
    found = {family.aliases.get(n, n): tuple(p.shape) for n, p in tower.named_parameters(remove_duplicate=False)}
    if {n: _flat(shape) for n, shape in found.items()} != dict(_shapes(family, spec)):
        return False
    if attributes_of(tower) != _attributes(tower, spec):
        return False
    acts = _activation_paths(family, spec)
    inner = [(name, module) for name, module in tower.named_modules(remove_duplicate=False) if name]
    return all(_is_plain(module, tower, acts.get(name), spec) for name, module in inner)


def attributes_of(tower: nn.Module) -> dict[str, object]:
    """What a tower's forward goes by beside its modules, copied."""
    kept = {name: getattr(tower, name) for name in _ATTRIBUTES if hasattr(tower, name)}
    return {name: list(value) if isinstance(value, list | tuple) else value for name, value in kept.items()}


def _attributes(tower: nn.Module, spec: VisionSpec) -> dict[str, object]:
    values = (list(spec.deepstack), spec.merge_size, spec.position_side)
    return {name: value for name, value in zip(_ATTRIBUTES, values, strict=True) if hasattr(tower, name)}


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A convolution's weight as the product that it is."""
    return shape if len(shape) != 5 else (shape[0], shape[1] * shape[2] * shape[3] * shape[4])


def _shapes(family: Family, spec: VisionSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    names, c, inner, merged = family.names, spec.hidden_size, spec.intermediate_size, spec.merged_size

    def linear(name: str, out: int, cols: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (out, cols)
        yield f"{name}.bias", (out,)

    def norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)

    def merger(m: MergerNames, i: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from norm(m.norm.format(i), width)
        yield from linear(m.fc1.format(i), merged, merged)
        yield from linear(m.fc2.format(i), spec.out_size, merged)

    yield from linear(names.patch, c, spec.patch_width)
    if spec.position_side:
        yield f"{names.position}.weight", (spec.position_side**2, c)
    for i in range(spec.depth):
        yield from norm(names.norm1.format(i), c)
        yield from linear(names.qkv.format(i), 3 * c, c)
        yield from linear(names.proj.format(i), c, c)
        yield from norm(names.norm2.format(i), c)
        yield from linear(names.fc1.format(i), inner, c)
        yield from linear(names.fc2.format(i), c, inner)
    yield from merger(names.merger, 0, c)
    for i in range(len(spec.deepstack)):
        yield from merger(names.deepstack, i, merged)


def _activation_paths(family: Family, spec: VisionSpec) -> dict[str, str]:
    """Where activations hang, and the class that must be there."""
    names = family.names

    def beside(name: str) -> str:
        return f"{name.rpartition('.')[0]}.act_fn"

    paths = {beside(names.fc1.format(i)): _ACTIVATIONS[spec.activation] for i in range(spec.depth)}
    paths[beside(names.merger.fc1)] = "GELU"
    return paths | {beside(names.deepstack.fc1.format(i)): "GELU" for i in range(len(spec.deepstack))}


def _is_plain(module: nn.Module, tower: nn.Module, activation: str | None, spec: VisionSpec) -> bool:
    own = [p for p in module._parameters.values() if p is not None]
    if "forward" in module.__dict__ or any(type(p) is not nn.Parameter for p in own):
        return False
    cls = type(module)
    if activation is not None:
        exact = cls.__name__ == activation and cls.__module__.startswith(("torch.nn.", "transformers.activations"))
        return exact and getattr(module, "approximate", "none") == "none"
    if cls in _LEAVES:
        return not isinstance(module, nn.LayerNorm) or module.eps == spec.norm_eps
    return not module._parameters and (
        cls is nn.ModuleList or cls.__module__ in (type(tower).__module__, _FUSED_PATCH_EMBED)
    )
