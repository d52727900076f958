"""Checks that a tower's modules and parameters are what the fused encoder computes.

Parameters must be as the spec says. Modules, their classes and their plain attributes (numbers, strings, flags) must be
as in a second tower that transformers builds from the same config on the meta device. A serving engine builds no second
tower: its adapter records the structure (`Built.of`) when the tower's constructor returns, before other code sees it.
"""

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from math import isclose, prod
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fusedvit.checks.accelerate_hooks import own_forwards
from fusedvit.checks.adapters import Plain, dotted
from fusedvit.checks.own_code.findings import OwnCode
from fusedvit.checks.ownership import describe, described_call, homes_of, is_of_python, is_own, name_of, own_class
from fusedvit.checks.source_code import Definition, cells_of, definition_of, wrapped_by
from fusedvit.errors import OF_ODD_OBJECTS, attempted, unnamed
from fusedvit.families.base import Family
from fusedvit.families.engine import HUGGING_FACE, Engine
from fusedvit.model.param_names import (
    BOUNDS,
    DownsampleNames,
    LastNormNames,
    PoolNames,
    bound_of,
    buffer_shapes,
    parameter_shapes,
)
from fusedvit.model.spec import VisionSpec

_COMPILED = "torch._dynamo.eval_frame.OptimizedModule"
_FLATTENED = "{} is in a flat parameter of FSDP1, with or without use_orig_params; fully_shard leaves the tower fused"
_SHARD, _SHARDED = "torch.distributed.tensor.DTensor", "torch.distributed.fsdp"  # a class; modules
_IS_SHARD = f"{{}} is a shard ({_SHARD}): fully_shard gathers it for calls, unshard() now, tensor parallelism never"
_READ_BEFORE = ", as fuse() read it (unfuse() and fuse() read it anew)"
_FUSED_PATCH_EMBED = "transformers.fusion_mapping"  # see Family.aliases
# Attribute of the tower -> its value according to the spec.
_OF_SPEC: Mapping[str, Callable[[VisionSpec], object]] = {
    "deepstack_visual_indexes": lambda spec: list(spec.deepstack),
    "spatial_merge_size": lambda spec: spec.merge_size,
    "num_grid_per_side": lambda spec: spec.position_side,
}
_GELU = (("GELU",), "none")
_SCALES = ("scale", "scaling")  # attributes of modules that compute attention, and of those around them
_HEAD_SIZES = ("head_size", "head_dim", "hidden_size_per_attention_head")
_WINDOW, _FULL_ATTENTION = "window_size", "fullatt_block_indexes"
CAUSAL = "is_causal"
DROPOUT = "attention_dropout"  # applied only in training mode
_REGISTRIES = (dict, OrderedDict)  # an OrderedDict in modules that an older torch has pickled
_PLAIN = (int, float, bool, str, type(None), tuple, list, dict, torch.dtype)
_MOST_KEPT = 32  # structures
# What torch.compile puts in the place of `nn.Module.__init__`, for good: it runs that, and notes the instance.
_TAGGING = Definition("torch._dynamo.mutation_guard", "install_generation_tagging_init.<locals>.patched_init")
_OURS = "fusedvit.serving.plugin"  # wraps the constructors of engines' towers
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # casting a tower rounds its rotary frequencies for good
_NOT_READ = {*vars(nn.Module()), "config"}  # compared separately


@dataclass(frozen=True)
class Built:
    """A tower as transformers builds it: classes, plain attributes, children and buffers by module path."""

    classes: Mapping[str, type]
    attributes: Mapping[str, Mapping[str, Any]]
    children: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, tuple[str, ...]]

    @staticmethod
    def like(tower: nn.Module) -> "Built":
        """The structure of a tower with the class and config of `tower`: the one that is kept, or built on the meta
        device.

        Raises:
            ValueError: a constructor that would run is neither torch's nor the engine's.
        """
        return _kept.get(_key(tower)) or _built(tower)

    def keep(self, tower: nn.Module) -> None:
        """Keeps a structure that `tower` agrees with, for other towers of its class and config.

        One that disagrees may come from something that was replaced while it was built.
        """
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[_key(tower)] = self

    @staticmethod
    def of(tower: nn.Module, engine: Engine = HUGGING_FACE) -> "Built":
        """The structure of `tower` as it stands.

        Raises:
            ValueError: a module's class, or its constructor, is neither torch's nor the engine's.
        """
        _refuse_constructors(tower, engine)
        modules = dict(tower.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            if not is_own(own_class(type(module)), engine):  # not recorded, as the module may be temporary
                raise ValueError(f"{path} is of class {name_of(type(module))}")
        return Built(
            {path: type(m) for path, m in modules.items()},
            {
                path: {n: v for n, v in vars(m).items() if n not in _NOT_READ and _is_plain_value(v)}
                for path, m in modules.items()
            },
            {path: tuple(m._modules) for path, m in modules.items()},
            {path: tuple(n for n, b in m._buffers.items() if b is not None) for path, m in modules.items()},
        )


_Key = tuple[type, frozenset[type], str]
_kept: dict[_Key, Built] = {}  # by the tower's class, those of its modules, and the config's text


def _key(tower: nn.Module) -> _Key:
    """The inner classes are others once the tower's module was reloaded."""
    _, *inner = tower.modules()
    return own_class(type(tower)), frozenset(map(type, inner)), repr(vars(tower.config))


def _built(tower: nn.Module) -> Built:
    _refuse_constructors(tower)  # first, as this takes a hundredth of the time of building
    config: Any = copy.deepcopy(tower.config)
    config._attn_implementation_internal = "eager"  # the constructor may refuse other implementations
    with torch.device("meta"):
        built = own_class(type(tower))(config)
    return Built.of(built)


def _refuse_constructors(tower: nn.Module, engine: Engine = HUGGING_FACE) -> None:
    """Raises ValueError if the constructor of a class in `tower` has been replaced: what the tower is compared with
    comes from it, too."""
    for home in dict.fromkeys(home for m in tower.modules() for home in homes_of(own_class(type(m)), "__init__")):
        value = vars(home)["__init__"]
        expected = Definition(home.__module__, f"{home.__qualname__}.__init__")
        if not is_of_python(home) and definition_of(_inside(value, expected, engine)) != expected:
            raise ValueError(f"{name_of(home)}.__init__ is {describe(value)}")


def _inside(constructor: object, expected: Definition, engine: Engine) -> object:
    """A constructor without the wrappers of torch's, the engine's and our own code around it."""
    while type(constructor) is FunctionType and (found := definition_of(constructor)) and found != expected:
        held = [cell.cell_contents for cell in cells_of(constructor)]
        if found == _TAGGING:
            (constructor,) = held
        elif found.module.startswith((*engine.decorators, _OURS)):  # a class's decorator may name nothing it wraps
            constructor = wrapped_by(constructor) or next((f for f in held if definition_of(f) == expected), None)
        else:
            break
    return constructor


def wrong_spec(tower: nn.Module, family: Family, spec: VisionSpec) -> str:
    """What in the tower's current config differs from `spec`; "" for nothing, or if the tower keeps no config."""
    if "config" not in vars(tower) and family.engine != HUGGING_FACE:
        return ""
    now = attempted(lambda: family.spec_from_config(tower.config), *OF_ODD_OBJECTS)
    if isinstance(now, Exception):
        return f"its config: {unnamed(now)}"
    causal = getattr(tower.config, CAUSAL, None)
    if causal:  # transformers passes it to the forward, if the caller does not
        return _differs(f"its config's {CAUSAL}", causal, None)
    other = [f.name for f in fields(spec) if getattr(now, f.name) != getattr(spec, f.name)]
    if not other:
        return ""
    return _differs(f"its config's {other[0]}", getattr(now, other[0]), getattr(spec, other[0])) + _READ_BEFORE


def gathers_shards(tower: nn.Module) -> bool:
    """Whether `tower` holds shards between calls, which each call gathers before its `forward` (`fully_shard`)."""
    wraps = any(cls.__module__.startswith(_SHARDED) for cls in type(tower).__mro__)
    return wraps and any(_is_shard(p) for p in tower.parameters())


def _is_shard(parameter: object) -> bool:
    return name_of(type(parameter)) == _SHARD


def wrong_parameters(plain: Plain, family: Family, spec: VisionSpec, shards: bool = False) -> str:
    """The first parameter that is missing, unexpected, or of another shape or class; "" for none.

    Args:
        shards: parameters may be shards, as of a tower that each call gathers.
    """
    found = {family.aliases.get(n, n): p for n, p in plain.parameters().items()}
    expected = dict(parameter_shapes(family.names, spec))
    table = f"{family.names.position}.weight"
    if table in expected:
        *tables, rows, width = expected[table]
        expected[table] = (*tables, -(-rows // family.engine.position_rows) * family.engine.position_rows, width)
    compiled = _compiled_inside(plain)
    if compiled:
        return compiled
    for name, shape in expected.items():
        wrong = _wrong_parameter(name, found[name], shape, family, shards) if name in found else _missing(plain, name)
        if wrong:
            return wrong
    left = found.keys() - expected.keys()
    return f"parameter {min(left)} is not expected" if left else ""


def _wrong_parameter(name: str, found: torch.Tensor, shape: tuple[int, ...], family: Family, shards: bool) -> str:
    """What is wrong with an existing parameter; "" for nothing.

    Args:
        shards: whether it may be a shard.
    """
    if isinstance(found, torch.Tensor) and _is_flattened(found):
        return _FLATTENED.format(name)
    shard = _is_shard(found)
    if not shard and type(found) is not nn.Parameter and not _is_engines(type(found), family.engine):
        return _differs(f"the class of {name}", name_of(type(found)), "torch.nn.Parameter")
    if _flat(tuple(found.shape)) != shape:  # after the class: quantised weights may be packed
        return _differs(f"the shape of {name}", tuple(found.shape), shape)
    if shard:
        return "" if shards else _IS_SHARD.format(name)
    return "" if found.layout is torch.strided else _differs(f"the layout of {name}", found.layout, torch.strided)


def _is_flattened(tensor: torch.Tensor) -> bool:
    """Whether FSDP1 keeps the values of `tensor` in a flat parameter, or `tensor` is that parameter.

    FSDP1 marks the flat parameter and, between calls, the tensor in a parameter's place. During calls that tensor is a
    view of the flat parameter.
    """
    of = tensor if isinstance(tensor, nn.Parameter) else tensor._base
    return bool(getattr(of, "_fsdp_flattened", False))


def _missing(plain: Plain, name: str) -> str:
    """Why a parameter is missing: a module on its path is wrapped, as for checkpointing or sharding, or the tensor is
    not a parameter but a buffer, or a plain tensor that sharding leaves when it joins parameters."""
    path, _, last = name.rpartition(".")
    parts = path.split(".")
    for i in range(1, len(parts)):
        outer = plain.modules.get(".".join(parts[:i]))
        if outer is not None and not isinstance(outer, nn.ModuleList) and parts[i] not in outer._modules:
            return f"{'.'.join(parts[:i])} is {name_of(type(outer))}, expected a module with {parts[i]}"
    module = plain.modules.get(path)
    if module is not None and module._buffers.get(last) is not None:  # as in quantised layers
        return f"{name} is a buffer, expected a parameter"
    there = None if module is None else vars(module).get(last)
    if isinstance(there, torch.Tensor):
        return _FLATTENED.format(name) if _is_flattened(there) else f"{name} is a plain tensor, expected a parameter"
    if path and module is not None and last not in module._parameters:  # as in a quantised or a parametrized layer
        return f"parameter {name} is missing: {path} is {name_of(type(module))}"
    return f"parameter {name} is missing"


def _compiled_inside(plain: Plain) -> str:
    """The first inner module in whose place `torch.compile(module)` or TorchScript has put another module."""
    for path, module in plain.modules.items():
        if path and isinstance(module, torch.jit.ScriptModule):
            return f"{path} is {name_of(type(module))}, compiled by TorchScript"
        if path and name_of(type(module)) == _COMPILED:
            return f"{path} is {_COMPILED}; {path}.compile(), or torch.compile of the model, leaves the tower fused"
    return ""


def _is_engines(cls: type, engine: Engine) -> bool:
    """Whether `cls` is a serving engine's parameter class, which has its own way of loading weights."""
    return engine != HUGGING_FACE and issubclass(cls, nn.Parameter) and is_own(cls, engine)


def wrong_modules(plain: Plain, built: Built, family: Family, spec: VisionSpec) -> str:
    """The first module that is missing, unexpected, of another class, or has its own `forward`; "" for none."""
    found, own_forward = plain.modules, own_forwards(plain)
    skipped = _fused_patch_embed(found, own_forward)
    for path, cls in built.classes.items():
        if path.startswith(skipped) and path:
            continue
        if path not in found:
            return f"module {path} is missing"
        module = found[path]
        if path in own_forward:
            own = described_call(vars(module)["forward"])
            return f"{path} has a forward of its own, {own}, expected that of {name_of(cls)}"
        if path and type(module) is not cls:
            named = name_of(type(module))
            return _differs(path, named, "another class of that name" if named == name_of(cls) else name_of(cls))
        if tuple(module._modules) != built.children[path] and isinstance(module, nn.ModuleList | nn.Sequential):
            return _differs(f"what {path} holds", list(module._modules), list(built.children[path]))
        wrong = _wrong_registries(path, module, built)
        if wrong:
            return wrong
    left = {path for path in found.keys() - built.classes.keys() if not path.startswith(skipped)}
    return f"module {min(left)} is not expected" if left else _wrong_activations(found, family, spec)


def _wrong_registries(path: str, module: nn.Module, built: Built) -> str:
    """A buffer that is missing or of another class, a registry of another type, or a registered object hidden by an
    attribute; "" for none."""
    for name in built.buffers[path]:
        buffer = module._buffers.get(name)
        if buffer is None:
            return f"buffer {dotted(path, name)} is missing"
        if type(buffer) is not torch.Tensor:  # its methods may be others
            return _differs(f"the class of {dotted(path, name)}", name_of(type(buffer)), "torch.Tensor")
    for registry in (module._parameters, module._buffers, module._modules):
        if type(registry) not in _REGISTRIES:
            return _differs(f"a registry of {path or 'the tower'}", name_of(type(registry)), "a dict")
        hidden = vars(module).keys() & registry.keys()
        if hidden:
            return _differs(dotted(path, min(hidden)), "an attribute of the instance", "what is registered")
    return ""


def _fused_patch_embed(found: Mapping[str, nn.Module], own_forward: Collection[str]) -> tuple[str, ...]:
    """The path of a patch embedding that transformers has replaced by a linear layer; empty if there is none."""
    for path, module in found.items():
        if type(module).__module__ == _FUSED_PATCH_EMBED and path not in own_forward:
            inside = {p: m for p, m in found.items() if p.startswith(f"{path}.")}
            if all(type(m) is nn.Linear and p not in own_forward for p, m in inside.items()):
                return (path,)
    return ()


def _wrong_activations(found: Mapping[str, nn.Module], family: Family, spec: VisionSpec) -> str:
    for path, (names, approximate) in _activation_paths(family, spec).items():
        cls = type(found.get(path))
        if cls.__name__ not in names or not cls.__module__.startswith(("torch.nn.", *family.engine.packages)):
            return _differs(path, name_of(cls), " or ".join(names))
        if approximate is not None and getattr(found[path], "approximate", None) != approximate:
            return _differs(f"{path}.approximate", getattr(found[path], "approximate", "missing"), approximate)
    return ""


def _activation_paths(family: Family, spec: VisionSpec) -> dict[str, tuple[tuple[str, ...], str | None]]:
    """Path of each activation module -> names of its classes, and its `approximate` if it is torch's GELU."""
    names, activations = family.names, family.engine.activations
    paths = {names.act.format(i): activations[spec.activation] for i in range(spec.depth)}
    if isinstance(names.merger, DownsampleNames):
        return paths | {names.merger.proj_act: _GELU, names.merger.act: activations["swiglu"]}
    if isinstance(names.merger, LastNormNames | PoolNames):
        return paths
    deepstack = [names.deepstack.at(i).act for i in range(len(spec.deepstack))] if names.deepstack else []
    return paths | dict.fromkeys([names.merger.act, *deepstack], _GELU)


def wrong_attributes(plain: Plain, built: Built, family: Family, spec: VisionSpec, code: OwnCode) -> str:
    """The first attribute that a forward reads and that is not as built; "" for none."""
    names = code.names
    for path, module in plain.modules.items():
        expected, own = built.attributes.get(path, {}), vars(module)
        for name in own.keys() - expected.keys() - _NOT_READ - {"forward"}:
            if path and name in names and callable(getattr(type(module), name, None)):
                return _differs(dotted(path, name), "an attribute of the instance", "the method of its class")
            if name in code.optional:
                return _differs(dotted(path, name), own[name], "to be missing")
        for name, value in expected.items():
            if name in names and (name not in own or not _is_same(own[name], value)):
                return _differs(dotted(path, name), own.get(name, "missing"), value)
        wrong = _wrong_values(path, own, _numbers(path, family, spec) | dict(family.engine.values), family.engine)
        if wrong:
            return wrong
        if own.get("training", True) and own.get(DROPOUT):
            return _differs(dotted(path, DROPOUT), own[DROPOUT], "0 in training mode")
    return _wrong_tower(plain.tower, spec)


def _wrong_values(path: str, own: Mapping[str, Any], values: Mapping[str, object], engine: Engine) -> str:
    """The first of a module's attributes with a wrong value or an object of the wrong class; "" for none."""
    for name, value in values.items():
        if not _are_equal(own.get(name, value), value):
            return _differs(dotted(path, name), own[name], value)
    for name in own.keys() & engine.objects.keys():
        if name_of(type(own[name])) not in engine.objects[name]:
            return _differs(dotted(path, name), name_of(type(own[name])), min(engine.objects[name]))
    return ""


def _are_equal(got: object, expected: object) -> bool:
    """Whether two values are equal; floats may have been computed in another order."""
    if isinstance(got, float) and isinstance(expected, float):
        return isclose(got, expected)
    return bool(got == expected)


def _numbers(path: str, family: Family, spec: VisionSpec) -> dict[str, object]:
    """Attributes of the module at `path` whose value the spec gives: a norm's epsilon, a gated MLP's limit."""
    merger = family.names.merger
    if isinstance(merger, DownsampleNames) and path == merger.proj_norm:
        return {"eps": spec.merger_eps}
    everywhere: dict[str, object] = {"eps": spec.norm_eps, "variance_epsilon": spec.norm_eps}
    everywhere["swiglu_limit"] = spec.glu_limit
    if family.engine != HUGGING_FACE:  # whose second tower has the others
        everywhere |= dict.fromkeys(_SCALES, spec.attention_scale or spec.head_dim**-0.5)
        everywhere |= dict.fromkeys(_HEAD_SIZES, spec.head_dim)
        everywhere |= {"use_clipped_linears": spec.clipped, "root_hidden_size": spec.hidden_size**0.5}
    return everywhere


def _wrong_tower(tower: nn.Module, spec: VisionSpec) -> str:
    """An attribute of the tower itself that contradicts the spec; "" for none."""
    for name, of in _OF_SPEC.items():
        got: Any = getattr(tower, name, None)
        got = list(got) if type(got) in (list, tuple) else got  # a subclass may compare differently
        if got is not None and (type(got) not in _PLAIN or got != of(spec)):
            return _differs(name, got, of(spec))
    window: Any = getattr(tower, _WINDOW, None)
    side = spec.merge_size * spec.patch_size  # of a merged token; the code rounds a window down to whole ones
    if window is not None and (type(window) is not int or window // side != spec.window):
        return _differs(_WINDOW, window, spec.window * side)
    full = getattr(tower, _FULL_ATTENTION, None)
    if full is not None and sorted(set(full) & set(range(spec.depth))) != list(spec.full_attention):
        return _differs(_FULL_ATTENTION, full, list(spec.full_attention))
    return ""


def wrong_buffers(tower: nn.Module, family: Family, spec: VisionSpec, names: Collection[str]) -> str:
    """The first buffer that a forward reads and that is unexpected or has other content than when built; "" for none.

    Waits for the GPU.
    """
    engine, buffers = family.engine, dict(tower.named_buffers(remove_duplicate=False))
    given = dict(buffer_shapes(family.names, spec))
    for path, shape in given.items():
        got = tuple(getattr(buffers.get(path), "shape", ())) if path in buffers else "missing"
        if got != shape:
            return _differs(f"buffer {path}", got, shape)
    for path, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor):
            return _differs(f"buffer {path}", name_of(type(buffer)), "torch.Tensor")
        if buffer.requires_grad:
            return f"buffer {path} wants a gradient"
        name = path.rpartition(".")[2]
        read = name in names and buffer.device.type != "meta" and not path.startswith(engine.outside)
        if path in given or not read:
            continue
        if name not in engine.buffers:
            return f"buffer {path} is not expected"
        expected = engine.buffers[name](spec, tuple(buffer.shape))
        found = buffer.detach().float().cpu()
        if not any(_is_close(found, expected.to(dtype).float(), engine.tolerance) for dtype in _DTYPES):
            return f"buffer {path} does not hold the rotary frequencies of base {spec.rope_theta:g}"
    return _uneven_bounds(buffers, family, spec) if spec.clipped else ""


def _uneven_bounds(buffers: Mapping[str, torch.Tensor], family: Family, spec: VisionSpec) -> str:
    """The first clipped layer whose input bounds differ from those of a layer that shares its product; "" for none."""
    for layers in (family.names.qkv, family.names.fc1):
        names = [bound_of(name, bound) for name in layers for bound in BOUNDS[:2]]
        found = torch.stack([buffers[name.format(i)] for i in range(spec.depth) for name in names])
        bounds = found.view(spec.depth, len(layers), 2)
        other = (bounds != bounds[:, :1]).any(2).nonzero().tolist()
        if other:
            block, layer = other[0]
            return f"{layers[layer].format(block)} has other input bounds than {layers[0].format(block)}"
    return ""


def _is_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    expected = expected.to(found.device)  # serving engines may build towers under a default device
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=tolerance)


def dropouts(tower: nn.Module) -> Iterator[nn.Module]:
    """Modules with attention dropout, for which training mode matters."""
    return (module for module in tower.modules() if vars(module).get(DROPOUT))


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the patch embedding's convolution as a matrix; other shapes are unchanged."""
    return shape if len(shape) != 5 else (shape[0], prod(shape[1:]))


def _is_plain_value(value: object) -> bool:
    return isinstance(value, _PLAIN) or callable(value) and not isinstance(value, type | nn.Module)


def _is_same(got: Any, expected: Any) -> bool:
    """Whether two values are equal plain values, or methods or partial functions of the same function."""
    if got is expected:
        return True
    if isinstance(expected, functools.partial) and isinstance(got, functools.partial):
        return (got.func, got.args, got.keywords) == (expected.func, expected.args, expected.keywords)
    if type(expected) is MethodType and type(got) is MethodType:
        return got.__func__ is expected.__func__
    if not isinstance(expected, _PLAIN) or not isinstance(got, _PLAIN):
        return False
    both: list[Any] = [got, expected]
    pair = [list(value) for value in both] if {type(got), type(expected)} <= {list, tuple} else []
    return bool(pair[0] == pair[1]) if pair else type(got) in _PLAIN and bool(got == expected)


def _differs(what: str, got: object, expected: object) -> str:
    return f"{what} is {got if isinstance(got, str) else repr(got)}, expected {expected}"
