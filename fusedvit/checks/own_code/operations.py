"""Checks vLLM's operations, each of which takes the first of its registered implementations that fits its arguments.

The classes that choose must be vLLM's own, and so must be every implementation that may be chosen.
"""

import sys
from typing import Any

from fusedvit.checks.own_code.walk import CodeWalk
from fusedvit.checks.ownership import describe
from fusedvit.checks.source_code import Definition, definition_of

_HOME, _OPERATIONS = "vllm.ir.op", "vllm.ir.ops"
_CHOOSING = (  # methods between the call of an operation and its implementation
    *("IrOp.__call__", "IrOp._inner_call", "IrOp.dispatch", "IrOpImpl.func_impl_fn", "IrOpImpl.supports_args"),
    *("IrOpInplaceOverload.__call__", "IrOpInplaceOverload._inner_call"),
)
_LAST = "native"  # taken where no other implementation is, or fits
_PREFERRED, _REGISTERED, _RUNS = "_priority_impls", "impls", "impl_fn"


def follow_operations(walk: CodeWalk) -> None:
    """Follows the operations that code names."""
    home, operations = (sys.modules.get(name) for name in (_HOME, _OPERATIONS))
    if home is None or operations is None:
        return
    named = sorted(walk.found.names & vars(home)["IrOp"].registry.keys())
    for name in named:
        operation = vars(home)["IrOp"].registry[name]
        walk.found.note_slot(operations, name)
        if vars(operations).get(name) is not operation:
            walk.found.note_foreign(f"{_OPERATIONS}.{name} is {describe(vars(operations).get(name))}")
        _follow_implementations(walk, f"{_OPERATIONS}.{name}", operation)
    for path in _CHOOSING if named else ():
        cls, _, method = path.partition(".")
        walk.found.note_slot(vars(home)[cls], method)
        value = getattr(vars(home)[cls], method, None)
        if definition_of(value) != Definition(_HOME, path):
            walk.found.note_foreign(f"{_HOME}.{path} is {describe(value)}")


def _follow_implementations(walk: CodeWalk, where: str, operation: Any) -> None:
    registered = getattr(operation, _REGISTERED)
    walk.found.registries += [(vars(operation), _PREFERRED), (vars(operation), _REGISTERED), (registered, _LAST)]
    for chosen in (*getattr(operation, _PREFERRED), registered[_LAST]):
        value = getattr(chosen, _RUNS)
        walk.found.registries.append((vars(chosen), _RUNS))
        walk.found.keep(value)
        found = definition_of(value)
        if found is None or not found.module.startswith(walk.engine.packages):
            walk.found.note_foreign(f"the implementation {chosen.provider!r} of {where} is {describe(value)}")
