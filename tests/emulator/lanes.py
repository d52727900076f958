"""PTX instructions on the registers of a warp, each as a line of Python: what `program.py` strings together.

Each handler gives an expression and the type of the destination.
"""

import re
from collections.abc import Callable

from tests.emulator.names import DTYPES, VIEWS, Names, Unsupported, vector
from tests.emulator.ptx import Instruction

BYTES = {"s8": "i1", "u8": "u1"}  # held in 16 bits
WIDER = {"s32": "s64", "u32": "u64", "u16": "u32", "s16": "s32"}
ROUNDED = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}

Handler = Callable[[Names, list[str], tuple[str, ...]], tuple[str, str]]  # (expression, type of the destination)


def _plain(function: str) -> Handler:
    """`op.type d, a, b, …`, a function of operands of that type."""

    def handle(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
        kind = parts[-1]
        if kind in ("bf16", "f16", "bf16x2", "f16x2"):
            width, inner = ("in_pairs", kind[:-2]) if kind.endswith("x2") else ("in_halves", kind)
            reads = ", ".join(names.read(o, kind) for o in operands[1:])
            return f"{width}({inner!r}, {function}, {reads})", kind
        return f"{function}({', '.join(names.read(o, kind) for o in operands[1:])})", kind

    return handle


def _setp(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    compare, kind = parts[1], parts[-1]
    a, b = (names.read(o, kind) for o in operands[1:3])
    opposite = {"ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt", "equ": "ne", "neu": "eq"}
    signs = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
    if kind != "f32":
        return f"{a} {signs[compare]} {b}", "pred"
    if compare in ("ne", "equ"):  # ordered and unequal; unordered or equal
        return (f"({a} < {b}) | ({a} > {b})" if compare == "ne" else f"~(({a} < {b}) | ({a} > {b}))"), "pred"
    if compare in opposite:
        return f"~({a} {signs[opposite[compare]]} {b})", "pred"
    return f"{a} {signs[compare]} {b}", "pred"


def _selp(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    kind = parts[-1]
    a, b, condition = names.read(operands[1], kind), names.read(operands[2], kind), names.read(operands[3], "pred")
    return f"np.where({condition}, {a}, {b})", kind


def _mov(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    kind, source = parts[-1], operands[1]
    if not source.startswith("{"):
        return names.read(source, kind), kind
    halves = vector(source)
    inner, function = ("b16", "pair") if kind in ("b32", "u32") else ("b32", "words")
    return f"{function}({', '.join(names.read(o, inner) for o in halves)})", kind


def _cvt(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    into, of = parts[-2], parts[-1]
    if of in BYTES:
        byte = f"{names.read(operands[1], 'b16')}.astype('{BYTES[of]}')"
        return f"{byte}.astype({DTYPES[VIEWS[into]].__name__!r})", into
    reads = [names.read(o, of) for o in operands[1:]]
    if into in ("bf16x2", "f16x2"):
        return f"rounded_pair({into[:-2]!r}, {', '.join(reads)})", into
    if into in ("bf16", "f16"):
        return f"NARROW[{into!r}][1]({reads[0]})", into
    if of in ("bf16", "f16"):
        return f"NARROW[{of!r}][0]({reads[0]})", into
    if of == "f32":
        whole = next((f"{ROUNDED[p]}({reads[0]})" for p in parts if p in ROUNDED), reads[0])
        return whole if into == "f32" else f"to_integer({whole}, {DTYPES[VIEWS[into]].__name__!r})", into
    return f"{reads[0]}.astype({DTYPES[VIEWS[into]].__name__!r})", into


def _mad(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    kind = parts[-1]
    a, b = (names.read(o, kind) for o in operands[1:3])
    if parts[1] == "lo":
        return f"{a} * {b} + {names.read(operands[3], kind)}", kind
    return f"mul_wide({a}, {b}) + {names.read(operands[3], WIDER[kind])}", WIDER[kind]


def _mul(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    kind = parts[-1]
    if parts[1] not in ("lo", "hi", "wide"):
        return _plain("np.multiply")(names, parts, operands)
    a, b = (names.read(o, kind) for o in operands[1:3])
    if parts[1] == "wide":
        return f"mul_wide({a}, {b})", WIDER[kind]
    return (f"{a} * {b}" if parts[1] == "lo" else f"mul_hi({a}, {b})"), kind


def _shift(function: str) -> Handler:
    def handle(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
        kind = parts[-1]
        return f"{function}({names.read(operands[1], kind)}, {names.read(operands[2], 'u32')})", kind

    return handle


def _bfe(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    at, length = (names.read(o, "u32") for o in operands[2:4])
    return f"bfe({names.read(operands[1], parts[-1])}, {at}, {length})", parts[-1]


def _shfl(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    x, by = names.read(operands[1], "b32"), names.read(operands[2], "s32")
    lanes = {"idx": by, "bfly": f"w.lanes ^ {by}", "up": f"w.lanes - {by}", "down": f"w.lanes + {by}"}[parts[2]]
    return f"shuffled({x}, {lanes})", "b32"


def _redux(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    kind = parts[-1]
    function = {"or": "bitwise_or", "and": "bitwise_and", "xor": "bitwise_xor", "add": "add", "max": "maximum"}[
        parts[2]
    ]
    return f"np.{function}.reduce({names.read(operands[1], kind)})", kind


def _div(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    return _plain("np.divide" if parts[-1] == "f32" else "div")(names, parts, operands)


def _extreme(of_integers: str, of_floats: str) -> Handler:
    def handle(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
        if parts[-1] == "u16x2":
            return _of_halves(of_integers, *(names.read(operand, "u32") for operand in operands[1:])), "u32"
        ordered = parts[-1] == "f32" and "NaN" not in parts
        expression, kind = _plain(of_floats if ordered else of_integers)(names, parts, operands)
        return (f"np.maximum({expression}, 0)" if "relu" in parts else expression), kind

    return handle


def _of_halves(function: str, a: str, b: str) -> str:
    """The function on both 16-bit halves of two words."""
    low, high = f"{function}({a} & 0xFFFF, {b} & 0xFFFF)", f"{function}({a} >> 16, {b} >> 16)"
    return f"({low} | ({high} << 16))"


def _not(names: Names, parts: list[str], operands: tuple[str, ...]) -> tuple[str, str]:
    return f"~{names.read(operands[1], parts[-1])}", parts[-1]


HANDLERS: dict[str, Handler] = {
    "add": _plain("np.add"),
    "sub": _plain("np.subtract"),
    "mul": _mul,
    "mad": _mad,
    "fma": _plain("fma"),
    "div": _div,
    "rem": _plain("rem"),
    "neg": _plain("np.negative"),
    "abs": _plain("np.abs"),
    "min": _extreme("np.minimum", "smaller"),
    "max": _extreme("np.maximum", "larger"),
    "and": _plain("np.bitwise_and"),
    "or": _plain("np.bitwise_or"),
    "xor": _plain("np.bitwise_xor"),
    "not": _not,
    "shl": _shift("shl"),
    "shr": _shift("shr"),
    "bfe": _bfe,
    "prmt": lambda names, parts, ops: (f"prmt({', '.join(names.read(o, 'b32') for o in ops[1:])})", "b32"),
    "popc": lambda names, parts, ops: (f"np.bitwise_count({names.read(ops[1], parts[-1])})", "b32"),
    "ex2": _plain("np.exp2"),
    "lg2": _plain("np.log2"),
    "tanh": _plain("np.tanh"),
    "rcp": _plain("np.reciprocal"),
    "sqrt": _plain("np.sqrt"),
    "rsqrt": lambda names, parts, ops: (f"np.reciprocal(np.sqrt({names.read(ops[1], 'f32')}))", "f32"),
    "setp": _setp,
    "selp": _selp,
    "mov": _mov,
    "cvt": _cvt,
    "cvta": lambda names, parts, ops: (names.read(ops[1], "u64"), "u64"),
    "shfl": _shfl,
    "redux": _redux,
}


_WAYS = {"wide", "lo", "hi"}
MODIFIERS: dict[str, set[str]] = {  # beside types, and what changes nothing here
    "min": {"NaN", "relu", "u16x2"},
    "max": {"NaN", "relu", "u16x2"},
    "mul": _WAYS,
    "mad": _WAYS - {"hi"},
    "setp": {"lt", "le", "gt", "ge", "eq", "ne", "ltu", "leu", "gtu", "geu", "equ", "neu"},
    "cvt": {*ROUNDED, *BYTES},
    "cvta": {"param"},
    "shfl": {"sync", "idx", "bfly", "up", "down"},
    "redux": {"sync", "or", "and", "xor", "add", "max"},
}
INDIFFERENT = {"rn", "ftz", "approx", "full"}


def line_of(names: Names, instruction: Instruction) -> str:
    """The instruction as one line of Python.

    Raises:
        Unsupported: it has no meaning here.
    """
    parts, operands = instruction.op.split("."), instruction.operands
    known = MODIFIERS.get(parts[0], set()) | INDIFFERENT | set(VIEWS)
    if parts[0] not in HANDLERS or not known.issuperset(parts[1:]):
        raise Unsupported(str(instruction))
    if parts[0] == "mov" and operands[0].startswith("{"):
        return _taken_apart(names, parts[-1], operands)
    try:
        expression, kind = HANDLERS[parts[0]](names, parts, operands)
        into = names.written(operands[0], kind)
    except (KeyError, ValueError) as error:
        raise Unsupported(f"{instruction}: {error!r}") from error
    if instruction.guard:
        where = f"{'~' * instruction.negated}{names.read(instruction.guard, 'pred')}"
        return f"np.copyto({into}, {expression}, where={where})"
    call = re.fullmatch(r"(np\.(?:add|subtract|multiply|divide|exp2|negative|bitwise_\w+))\(([^()]*)\)", expression)
    if call and "reduce" not in expression:
        return f"{call.group(1)}({call.group(2)}, out={into})"
    return f"{into}[:] = {expression}"


def _taken_apart(names: Names, kind: str, operands: tuple[str, ...]) -> str:
    """`mov.b32 {low, high}, d`: `_` takes a half that nobody wants."""
    source = names.read(operands[1], kind)
    inner, shift = ("b16", 16) if kind in ("b32", "u32") else ("b32", 32)
    lines = []
    for i, name in enumerate(vector(operands[0])):
        if name != "_":
            lines.append(f"{names.written(name, inner)}[:] = ({source} >> {shift * i}).astype('u{shift // 8}')")
    return "; ".join(lines)
