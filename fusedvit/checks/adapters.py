"""PEFT's LoRA layers in a tower: the tower without them, and their weights folded into its own.

    W' = W + sum over active adapters of scaling * B A,  computed in fp64 and rounded once, without bias

A LoRA layer replaces a linear layer or a convolution, which it keeps as `base_layer`. The original code adds the
adapters' products to that layer's output. The fused encoder multiplies by W', which is prepared again when an adapter,
a scale or the choice of adapters changes. PEFT itself is not imported.

Most values that a trained adapter adds are smaller than half a unit in the last place (ulp) of a bf16 weight. Rounding
to nearest would give W' = W there and lose the adapter, whose product the original code keeps. So the sum is rounded up
or down to a neighbour, up in a share of a row's elements equal to the sum's distance from the lower neighbour in ulps.
A product over K then contains what was added, plus noise below that of bf16 activations. If an adapter adds nothing, W'
is W.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedvit.checks.ownership import name_of
from fusedvit.checks.source_code import Definition, definition_of
from fusedvit.model.fp16_range import Products

_MODULE = "peft.tuners.lora.layer"
# Name of PEFT's class -> the class of its layers, and where its `forward` is defined.
_KINDS: dict[str, tuple[type[nn.Module], str]] = {
    "Linear": (nn.Linear, "Linear.forward"),
    "Conv2d": (nn.Conv2d, "_ConvNd.forward"),
    "Conv3d": (nn.Conv3d, "_ConvNd.forward"),
}
_BASE = "base_layer"
_RUN = (_BASE, "lora_A", "lora_B", "lora_dropout")
# Attributes, apart from parameters, that determine what a LoRA layer's forward computes.
_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "lora_variant", "lora_bias", "use_dora")
# Methods that its forward mentions but does not run here: they undo merges and serve batches that name adapters.
NOT_RUN = frozenset({"unmerge", "_mixed_batch_forward"})
_CASTS = "cast_input_dtype_enabled"
_GOLDEN = (math.sqrt(5) - 1) / 2  # the fractional parts of its multiples are spread evenly over [0, 1)
_EXPONENT = 0x7FF << 52  # the exponent bits of a float64


def dotted(path: str, name: str) -> str:
    """The path of what the module at `path` calls `name`; the tower's own path is ""."""
    return f"{path}.{name}" if path else name


def is_lora(module: nn.Module) -> bool:
    """Whether `module` is PEFT's LoRA layer around a linear layer or a convolution."""
    return type(module).__module__ == _MODULE and type(module).__qualname__ in _KINDS


class Plain(NamedTuple):
    """A tower without adapters: each LoRA layer is replaced by its base layer.

    Attributes:
        tower: the tower itself.
        modules: every module by path; a shared module appears under each of its paths; the tower's path is "".
        layers: the LoRA layers by path.
    """

    tower: nn.Module
    modules: dict[str, nn.Module]
    layers: dict[str, Any]

    @staticmethod
    def of(tower: nn.Module) -> "Plain":
        """Collects the modules in one walk over `tower`."""
        modules = dict(tower.named_modules(remove_duplicate=False))
        layers = {path: module for path, module in modules.items() if is_lora(module)}
        if layers:
            inside = tuple(f"{path}." for path in layers)
            modules = {path: module for path, module in modules.items() if not path.startswith(inside)}
            modules |= {path: getattr(layer, _BASE) for path, layer in layers.items()}
        return Plain(tower, modules, layers)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name; a shared parameter appears under each of its names."""
        return {
            dotted(path, name): parameter
            for path, module in self.modules.items()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }


def modules_run(layer: Any) -> Iterator[nn.Module]:
    """A LoRA layer and the modules that its forward calls.

    Modules that only other kinds of adapters have are left out, as `cannot_fold` refuses such adapters if active.
    """
    yield layer
    for name in _RUN:
        yield from getattr(layer, name).modules()


def modules_read(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """`module` and the modules inside it by path; a shared module appears under each of its paths.

    Modules of a LoRA layer's inactive adapters are left out.
    """
    yield path, module
    is_layer = is_lora(module)
    for name, child in module._modules.items():
        if child is None:
            continue
        of = dotted(path, name)
        if is_layer and name != _BASE and isinstance(child, nn.ModuleDict):  # by adapter
            yield of, child
            active = active_adapters(module)
            for adapter in filter(active.__contains__, child):
                yield from modules_read(child[adapter], f"{of}.{adapter}")
        else:
            yield from modules_read(child, of)


def slots_read(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Slots of the attributes that determine what a LoRA layer's forward computes, for change detection."""
    if not is_lora(module):
        return
    yield from ((vars(module), name) for name in (*_STATE, _CASTS))
    for dropout in module.get_submodule("lora_dropout").children():
        yield from ((vars(dropout), name) for name in ("training", "p"))


def cannot_fold(plain: Plain) -> str:
    """The first adapter layer that cannot be folded into one matrix, and why; "" if there is none."""
    for path, module in plain.modules.items():
        if type(module).__module__.startswith("peft."):
            return f"{path} is {name_of(type(module))}, expected a LoRA layer of {[*_KINDS]}"
    for path, layer in plain.layers.items():
        why = _why_not(layer)
        if why:
            return f"{path}: {why}"
    return ""


def _why_not(layer: Any) -> str:
    if definition_of(type(layer).forward) != Definition(_MODULE, _KINDS[type(layer).__name__][1]):
        return "the forward of its class is not PEFT's"
    if layer._disable_adapters and layer.merged_adapters:
        return "its adapters are merged and switched off, which the next call undoes"
    if getattr(layer, "fan_in_fan_out", False):
        return "its weight is transposed (fan_in_fan_out)"
    for name in active_adapters(layer):
        why = _why_not_adapter(layer, name)
        if why:
            return f"adapter {name!r} {why}"
    return ""


def _why_not_adapter(layer: Any, name: str) -> str:
    variant = getattr(layer, "lora_variant", {}).get(name)  # PEFT before 0.16 knows DoRA alone
    if variant is not None or layer.use_dora.get(name):
        return f"is of another kind than LoRA ({type(variant).__name__ if variant is not None else 'DoRA'})"
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    kind = _KINDS[type(layer).__name__][0]
    if any(type(m) is not kind or "forward" in vars(m) for m in (down, up)):
        return f"does not consist of two layers of {kind.__name__}"
    if kind is not nn.Linear and not _is_one_convolution(getattr(layer, _BASE), down, up):
        return "is a convolution of other steps than its layer's"
    scaling = layer.scaling.get(name)
    if isinstance(scaling, torch.Tensor):  # as PEFT's `prepare_model_for_compiled_hotswap` leaves it
        return "has a tensor as its scaling, expected a number: set layer.scaling[adapter] to its item()"
    if not isinstance(scaling, int | float) or not math.isfinite(scaling):
        return f"has the scaling {scaling!r}, expected a finite number"
    if not isinstance(dropout, nn.Identity) and (type(dropout) is not nn.Dropout or (dropout.training and dropout.p)):
        return "has dropout in training mode"
    return _why_not_tensors(layer, down, up)


def _is_one_convolution(base: Any, down: Any, up: Any) -> bool:
    """Whether A has the base layer's kernel and steps, and B is a convolution of kernel size 1."""
    steps = ("kernel_size", "stride", "padding", "dilation", "groups")
    alike = type(base) is type(down) and all(getattr(base, name) == getattr(down, name) for name in steps)
    return alike and set(up.kernel_size) == set(up.stride) == {1} and up.groups == down.groups == 1


def _why_not_tensors(layer: Any, down: Any, up: Any) -> str:
    base = getattr(layer, _BASE).weight
    shape = (up.weight.shape[0], *down.weight.shape[1:])
    if shape != tuple(base.shape) or math.prod(up.weight.shape[1:]) != down.weight.shape[0] or down.bias is not None:
        return f"gives a product of shape {shape}, expected {tuple(base.shape)}"
    parts = {"lora_A.weight": down.weight, "lora_B.weight": up.weight, "lora_B.bias": up.bias}
    for name, p in parts.items():
        if p is None:
            continue
        if p.device != base.device:
            return f"has {name} on {p.device}, its layer on {base.device}"
        if not p.is_floating_point() or p.element_size() < 2:
            return f"has {name} in {p.dtype}, expected floats of 2 bytes or more"
        wrong = not_dense(p)
        if wrong:  # as a slice of a larger matrix, which PEFT's add_weighted_adapter leaves with "svd"
            return f"has {name} that is {wrong} (strides {p.stride()}): set its data to data.clone()"
    if not getattr(layer, _CASTS, True) and down.weight.dtype != base.dtype:
        return f"is {down.weight.dtype} and does not cast its input"
    if up.bias is not None and getattr(layer, _BASE).bias is None:
        return "has a bias, its layer has none"
    return ""


def not_dense(p: torch.Tensor) -> str:
    """What is wrong if the elements of `p` do not fill one contiguous range of memory in some order of dimensions, as
    fingerprints need; "" if they do."""
    if p.is_neg():
        return "a negated view"
    outermost_first = sorted(range(p.ndim), key=p.stride, reverse=True)
    dense = p.is_contiguous() or p.data.permute(outermost_first).is_contiguous()
    return "" if dense else "not dense in memory"


def active_adapters(layer: Any) -> list[str]:
    """The adapters whose products the layer's next call adds to its base layer's."""
    if layer._disable_adapters or layer.merged_adapters:
        return []
    chosen = layer._active_adapter
    names = [chosen] if isinstance(chosen, str) else chosen
    return [name for name in names if name in layer.lora_A]


def folded(plain: Plain, sums: Products) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Parameters of the tower with active adapters folded in, and the names of those that are new tensors.

    `cannot_fold` must have found nothing. `sums` gets each sum, rounded to nearest, to judge whether fp16 can hold it.
    """
    parameters: dict[str, torch.Tensor] = dict(plain.parameters())
    new: set[str] = set()
    for path, layer in plain.layers.items():
        active = active_adapters(layer)
        if not active:
            continue
        weight, bias = parameters[f"{path}.weight"].data, parameters.get(f"{path}.bias")
        pairs = [(layer.scaling[n], layer.lora_B[n].weight.data, layer.lora_A[n].weight.data) for n in active]
        products = [s * (up.double().flatten(1) @ down.double().flatten(1)).view_as(weight) for s, up, down in pairs]
        exact = weight.double() + sum(products)
        sums.add(f"{path}.weight with its adapters", exact, exact.to(weight.dtype), bias)
        parameters[f"{path}.weight"] = rounded_evenly(exact, weight.dtype)
        new.add(f"{path}.weight")
        biases = [layer.scaling[n] * b.double() for n in active if (b := layer.lora_B[n].bias) is not None]
        if biases and bias is not None:
            exact = bias.detach().double() + sum(biases)
            sums.add(f"{path}.bias with its adapters", exact[:, None], exact.to(bias.dtype)[:, None])
            parameters[f"{path}.bias"] = rounded_evenly(exact, bias.dtype)
            new.add(f"{path}.bias")
    return parameters, frozenset(new)


def rounded_evenly(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`exact` (float64) rounded to one of its two neighbours in `dtype`, without bias over any row.

    The result is deterministic, on every device: it uses no random numbers and only exact operations.
    """
    info, size = torch.finfo(dtype), exact.abs()
    ulp = size.clamp(info.tiny, info.max)
    ulp.view(torch.int64).bitwise_and_(_EXPONENT)  # the power of two below; `tiny` for subnormal numbers
    ulp *= info.eps
    thresholds = torch.arange(exact.numel(), dtype=torch.float64, device=exact.device).mul_(_GOLDEN).frac_()
    evenly = thresholds.view_as(exact).add_(exact / ulp).floor_().mul_(ulp)
    return torch.where(size <= info.max, evenly, exact).to(dtype)  # beyond the largest, `to` rounds to nearest
