"""Finds methods of tensors that code calls by operators, without naming them."""

import dis
from collections.abc import Iterator
from types import CodeType

from fusedvit.checks.source_code import parts_of

# Operator -> method, without underscores; a binary operator also leads to its reflected and in-place methods.
_BINARY = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
_NAMED = {  # the part after BINARY_ and INPLACE_ in instructions of Python 3.10 -> operator
    "ADD": "+", "SUBTRACT": "-", "MULTIPLY": "*", "TRUE_DIVIDE": "/", "FLOOR_DIVIDE": "//", "MODULO": "%",
    "POWER": "**", "MATRIX_MULTIPLY": "@", "AND": "&", "OR": "|", "XOR": "^", "LSHIFT": "<<", "RSHIFT": ">>",
}  # fmt: skip
_COMPARED = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
_SPECIAL = {
    "BINARY_SUBSCR": "getitem", "BINARY_SLICE": "getitem", "STORE_SUBSCR": "setitem", "STORE_SLICE": "setitem",
    "UNARY_NEGATIVE": "neg", "UNARY_INVERT": "invert", "GET_ITER": "iter", "UNPACK_SEQUENCE": "iter",
    "LIST_EXTEND": "iter", "CONTAINS_OP": "contains",
}  # fmt: skip
_OPERATORS = {
    opcode
    for name, opcode in dis.opmap.items()
    if name.startswith(("BINARY_", "INPLACE_", "COMPARE_")) or name in _SPECIAL
}
_methods_of: dict[tuple[int, int], tuple[str, ...]] = {}  # an instruction's two bytes -> methods


def operators_in(code: CodeType) -> Iterator[str]:
    """Methods of `torch.Tensor` that the operators in `code` lead to."""
    for part in parts_of(code):
        code_bytes = part.co_code
        words = {*zip(code_bytes[::2], code_bytes[1::2], strict=True)}
        words = {word for word in words if word[0] in _OPERATORS}
        if not words <= _methods_of.keys():  # cached, as `dis` takes a hundred times as long as these sets
            for instruction in dis.get_instructions(part):
                word = instruction.opcode, code_bytes[instruction.offset + 1]
                _methods_of[word] = _methods(instruction.opname, instruction.argrepr)
        for word in words:
            yield from _methods_of[word]


def _methods(name: str, sign: str) -> tuple[str, ...]:
    """The methods that an instruction calls, given its name and its operator."""
    kind, _, operation = name.partition("_")
    if kind in ("BINARY", "INPLACE") and (operation == "OP" or operation in _NAMED):
        sign = _NAMED.get(operation, sign.removesuffix("="))
        spelled = _BINARY.get(sign, "getitem")  # "[]" since Python 3.14
        return tuple(f"__{side}{spelled}__" for side in ("", "r", "i"))
    if name == "COMPARE_OP":
        return (f"__{_COMPARED[sign.removeprefix('bool(').removesuffix(')')]}__",)
    return (f"__{_SPECIAL[name]}__",) if name in _SPECIAL else ()
