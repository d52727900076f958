"""Checks that a tower would run the code that transformers, or its serving engine, defines.

The walk begins with `forward` of every class in the tower and follows the names that its code mentions: methods of the
class, functions of its module and of transformers' helpers, functions of torch, and the attention function that would
be looked up; in an engine's tower also the methods and objects that modules hold and call. Each must be the one that
its module's source defines. The walk also lists their slots, so that change detection can compare them by identity.
"""

import sys
from dataclasses import replace
from functools import lru_cache

from fusedvit.checks import accelerate_hooks, adapters, module_calls
from fusedvit.checks.adapters import Plain
from fusedvit.checks.own_code.findings import Findings, OwnCode
from fusedvit.checks.own_code.instances import (
    follow_attributes,
    follow_called_by_others,
    follow_calls,
    follow_classes,
    follow_ours,
)
from fusedvit.checks.own_code.operations import follow_operations
from fusedvit.checks.own_code.registries import follow_registries
from fusedvit.checks.own_code.torch_names import TorchNames
from fusedvit.checks.own_code.walk import CodeWalk
from fusedvit.checks.ownership import describe, own_class
from fusedvit.checks.source_code import code_of, names_in
from fusedvit.families.engine import HUGGING_FACE, Engine

_OURS = ("fusedvit.kernels.reference.", "fusedvit.model.")  # modules that run on a CPU, and prepare weights everywhere


def own_code(plain: Plain, engine: Engine = HUGGING_FACE) -> OwnCode:
    """Follows the code that a tower would run."""
    walk = CodeWalk(engine)
    tower, *inner = plain.modules.values()
    for cls in dict.fromkeys([own_class(type(tower)), *map(type, inner)]):
        walk.follow_class(cls)
    if engine != HUGGING_FACE:
        for path, module in plain.modules.items():
            follow_attributes(walk, path, module)
        follow_called_by_others(walk, inner)
        follow_operations(walk)
    follow_calls(walk, plain)
    layers = _code_of_layers(plain, engine)
    follow_registries(walk, plain.modules.values())
    follow_classes(walk, plain)
    found = walk.found
    walk.torch_names.follow_operators()
    follow_ours(walk, tower)
    ours = _fused_code(engine)
    on_cpu = next(tower.parameters()).device.type == "cpu"
    # On a GPU this code only prepares weights: a call compares it where that was refused, to notice when it is back.
    slots = found.slots | ours.slots if on_cpu or ours.foreign else found.slots
    hooks = accelerate_hooks.code_slots(plain)
    return OwnCode(
        found.foreign or layers.foreign or ours.foreign,
        (*(slots | layers.slots).values(), *hooks, *module_calls.class_slots(inner)),
        tuple(found.registries),
        tuple((found.functions | layers.functions | accelerate_hooks.functions_of(hooks)).values()),
        frozenset(found.names | found.optional | engine.values.keys() | engine.objects.keys()),
        frozenset(found.optional),
        found.methods() | layers.methods(),
        tuple((vars(o).keys(), frozenset(names)) for part in (found, layers) for o, names in part.absent.values()),
    )


def _code_of_layers(plain: Plain, engine: Engine) -> Findings:
    """The code of PEFT's layers, followed separately, as its names do not concern the tower's attributes."""
    walk = CodeWalk(replace(engine, packages=(*engine.packages, "peft.")), skipped=adapters.NOT_RUN)
    for path, layer in plain.layers.items():
        for cls in dict.fromkeys(map(type, adapters.modules_run(layer))):
            walk.follow_class(cls)
        for name in sorted(vars(layer).keys() & walk.found.methods().get(type(layer), ())):
            if callable(getattr(type(layer), name)):  # a property wins over the instance
                walk.found.note_foreign(f"{path}.{name} of the instance is {describe(vars(layer)[name])}")
    return walk.found


def _fused_code(engine: Engine) -> Findings:
    """The torch functions and methods that fusedvit's own operations use, which can be replaced like the tower's."""
    torch_names = TorchNames(Findings(), engine)
    loaded = tuple(sys.modules)  # a copy: another thread may import a module meanwhile
    torch_names.follow({*_names_of_ours(tuple(sorted(name for name in loaded if name.startswith(_OURS))))})
    torch_names.follow_operators()
    return torch_names.found


@lru_cache(maxsize=4)
def _names_of_ours(modules: tuple[str, ...]) -> frozenset[str]:
    """Names that the code of fusedvit's `modules` mentions."""
    codes = [code for code in map(code_of, map(sys.modules.__getitem__, modules)) if code is not None]
    return frozenset().union(*map(names_in, codes))
