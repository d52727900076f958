"""Follows names that code mentions into torch: functions of torch's modules, and methods of tensors.

Each must be torch's own. If such a function is written in Python, the functions of its module, the C functions and the
tensor methods that it calls are followed too, and so are the functions that it holds.
"""

import sys
from types import FunctionType, MethodDescriptorType, ModuleType

import torch

from fusedvit.checks.own_code.findings import Findings
from fusedvit.checks.ownership import (
    describe,
    functions_of_c,
    is_foreign_name,
    is_foreign_object,
    is_operator,
    is_torchs,
)
from fusedvit.checks.source_code import (
    Definition,
    cells_of,
    defines_function,
    definition_of,
    names_in,
    wrapped_by,
)
from fusedvit.families.engine import Engine

_TENSOR_METHODS = {name for name in dir(torch.Tensor) if not name.startswith("_")}
_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
_OTHERS = ["lt", "le", "eq", "ne", "gt", "ge", "getitem", "setitem", "neg", "invert", "iter", "contains"]
_OPERATORS = [*(f"__{side}{name}__" for name in _BINARY for side in ("", "r", "i")), *(f"__{n}__" for n in _OTHERS)]
_OPERATORS_OF_C = {"__neg__": "neg", "__pos__": "positive", "__abs__": "abs", "__itruediv__": "__idiv__"}
_AROUND_C = ("torch.functional", "torch.nn.functional", "torch._tensor")  # modules of Python wrappers of C functions


class TorchNames:
    """Follows names into torch."""

    def __init__(self, found: Findings, engine: Engine) -> None:
        self.found = found
        self._engine = engine
        self._inside: set[int] = set()  # functions that were followed

    def follow_operators(self) -> None:
        """Follows the methods of tensors that operators call, whether code uses these operators or not: its bytecode
        would tell, in other instructions for each version of Python."""
        for name in _OPERATORS:
            self._follow_tensor(name)

    def follow(self, mentioned: set[str]) -> None:
        """Follows everything in torch that code which mentions these names could call."""
        for module in (torch, torch.nn.functional):
            self._follow_names_of(module, {n for n in mentioned if not isinstance(vars(module).get(n), ModuleType)})
        self.follow_methods(mentioned)

    def follow_methods(self, mentioned: set[str]) -> None:
        """Follows methods of tensors that code mentions."""
        for name in sorted(mentioned & _TENSOR_METHODS):
            self._follow_tensor(name)

    def follow_module(self, module: ModuleType, mentioned: set[str]) -> None:
        """Follows the mentioned names of a torch module and of its inner modules, which must be torch's own."""
        pending, seen = [module], set[str]()
        while pending:
            module = pending.pop()
            if module.__name__ in seen or not f"{module.__name__}.".startswith("torch."):
                continue
            seen.add(module.__name__)
            pending += self._follow_names_of(module, mentioned)

    def _follow_tensor(self, name: str) -> None:
        if not hasattr(torch.nn.Parameter, name):
            for cls in (torch.nn.Parameter, torch.Tensor):
                self.found.note_absent(cls, [name])
            return
        self.found.note_slot(torch.nn.Parameter, name)  # which has none of these itself: those of tensors are found
        if name in vars(torch.nn.Parameter):
            self.found.note_foreign(f"torch.nn.Parameter.{name} is {describe(vars(torch.nn.Parameter)[name])}")
        value = vars(torch.Tensor).get(name)  # what C defines lies in a base class, and cannot be replaced
        if name in vars(torch.Tensor) and not _is_method_of_tensors(value, name):
            self.found.note_foreign(f"torch.Tensor.{name} is {describe(value)}")
        self.found.keep(value)
        self._follow_inside(value)

    def _follow_names_of(self, module: ModuleType, mentioned: set[str]) -> list[ModuleType]:
        """Follows the mentioned names of a torch module; returns the modules among them."""
        inner: list[ModuleType] = []
        namespace = module.__name__.removeprefix("torch.ops.")
        for name in sorted(mentioned & vars(module).keys()):
            value = vars(module)[name]
            self.found.note_slot(module, name)
            foreign = is_foreign_object(value, self._engine) and not is_operator(value, namespace, name)
            if foreign or is_foreign_name(value, name):
                self.found.note_foreign(f"{module.__name__}.{name} is {describe(value)}")
            elif isinstance(value, ModuleType):
                inner.append(value)
            self.found.keep(value)
            self._follow_inside(value)
        return inner

    def _follow_inside(self, value: object) -> None:
        """Follows what torch's Python function `value` calls: functions of C and of its module, and tensor methods."""
        value = inner if type(value) is FunctionType and (inner := wrapped_by(value)) is not None else value
        self.found.keep(value)
        if type(value) is not FunctionType or id(value) in self._inside or value.__module__ not in _AROUND_C:
            return
        self._inside.add(id(value))
        for held in (cell.cell_contents for cell in cells_of(value)):  # `boolean_dispatch`: the two to choose from
            if not is_torchs(held):
                self.found.note_foreign(f"{value.__module__}.{value.__name__} holds {describe(held)}")
            self._follow_inside(held)
        mentioned = names_in(value.__code__)
        self._follow_helpers(sys.modules[value.__module__], mentioned)
        for module in (torch, torch._C._nn):
            if module.__name__.rpartition(".")[2] in mentioned:
                self._follow_names_of(module, mentioned & functions_of_c(module))
        if "_VF" in mentioned:  # torch._VF has no functions of its own: its `__getattr__` finds each in C
            names = mentioned & functions_of_c(torch)
            self.found.note_absent(torch._VF, names)
            for name in sorted(names & vars(torch._VF).keys()):
                self.found.note_foreign(f"torch._VF.{name} is {describe(vars(torch._VF)[name])}", torch._VF, name)
        if value.__module__ != torch.Tensor.__module__:
            self.follow_methods(mentioned)

    def _follow_helpers(self, module: ModuleType, mentioned: set[str]) -> None:
        """Follows the mentioned functions that the source of a torch module defines, each of which must be that one."""
        for name in sorted(n for n in mentioned & vars(module).keys() if defines_function(module.__name__, n)):
            value = vars(module)[name]
            self.found.note_slot(module, name)
            if type(value) is not FunctionType or not is_torchs(value) or not _is_defined_as(value, module, name):
                self.found.note_foreign(f"{module.__name__}.{name} is {describe(value)}")
            self._follow_inside(value)


def _is_defined_as(function: FunctionType, module: ModuleType, name: str) -> bool:
    """Whether the source of `module` defines `function`, without its decorators, under `name`."""
    while (inner := wrapped_by(function)) is not None:
        function = inner
    return definition_of(function) == Definition(module.__name__, name)


def _is_method_of_tensors(value: object, name: str) -> bool:
    """Whether `value`, found in the class of tensors, is torch's own method `name`.

    Methods for operators may have another name: that of the method which they call.
    """
    if type(value) is FunctionType:
        return is_torchs(value) and (name.startswith("__") or value.__name__ == name)
    return type(value) is MethodDescriptorType and value.__name__ == _OPERATORS_OF_C.get(name, name)
