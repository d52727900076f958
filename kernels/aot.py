"""Recorded launches compiled ahead of time, without a GPU: registers, spills, warnings, shared memory, row offsets.

`record` runs host code with every kernel launch noted instead of made (tensors may be on the meta device);
`compile_launch` compiles one such launch for a compute capability and reports what the compilers said.
With a GPU, `compile_in_place` does both in the way that a launch would: the launch itself then compiles nothing.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedvit.kernels.hopper import compat
from fusedvit.kernels.hopper.alternating_configs import HopperAlternatingConfig
from fusedvit.kernels.hopper.attention_places import placed_bytes
from fusedvit.kernels.hopper.transposed_configs import HopperTransposedConfig
from fusedvit.kernels.sass import (
    disassemble,
    exposed_exponentials,
    misplaced_ring,
    overwritten_barriers,
    rewritten_descriptors,
)

MAX_REGISTERS, REGISTERS_OF_SM = 255, 65536
HARMLESS_SPILL = 16  # bytes a thread, where ptxas had registers to spare
MAX_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
_EXPECTED = {  # what a 16-bit product is made of, and how its operands arrive
    80: ("mma.sync", "cp.async.cg"),
    90: ("wgmma.mma_async", "cp.async.bulk.tensor"),
    100: ("tcgen05.mma", "cp.async.bulk.tensor"),
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "num_ctas", "launch_pdl", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """One kernel launch, reduced to what decides its machine code."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def describe(self) -> str:
        """One line that tells this launch from its siblings."""
        consts = " ".join(f"{k}={v}" for k, v in self.constants if v is not None)
        dtypes = sorted({t.strip("*") for _, t in self.signature if t.startswith(("*bf", "*fp", "tensordesc"))})
        return f"{self.name} {','.join(dtypes)} {consts} {dict(self.options)}"


@dataclass(frozen=True)
class Compiled:
    """What the compilers said of one launch. `problems` is empty when it may ship."""

    launch: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    problems: tuple[str, ...]


def record(run: Callable[[], object]) -> list[Launch]:
    """The distinct kernel launches that `run()` would make, in order."""
    launches: dict[Launch, None] = {}

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches[launch_of(self, args, kwargs)] = None

    with mock.patch.object(JITFunction, "run", note):
        run()
    return list(launches)


def launch_of(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """The launch that `kernel.run(*args, **kwargs)` is."""
    options = tuple(sorted((k, v) for k, v in kwargs.items() if k in _OPTIONS))
    bound = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k not in _OPTIONS}
    signature, constants, aligned = [], [], []
    for param in kernel.params:
        value = bound[param.name]
        kind = "constexpr" if param.is_constexpr or value is None else _type_of(value)
        signature.append((param.name, kind))
        if kind == "constexpr":
            constants.append((param.name, value))
        elif isinstance(value, torch.Tensor) and value.storage_offset() * value.element_size() % 16 == 0:
            aligned.append(param.name)
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), options)


def _type_of(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
    if compat.AVAILABLE and isinstance(value, compat.TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    return {int: "i32", float: "fp32"}[type(value)]


def compile_in_place(run: Callable[[], object], capability: int, known: dict[Launch, Compiled]) -> list[Compiled]:
    """Compiles what `run()` would launch on the current GPU, whose capability is given, and checks it.

    Triton keeps the kernels in this process and in its cache on disk, where later launches find them.

    Args:
        known: what this process has compiled so, by launch; added to.
    """
    launches: dict[Launch, None] = {}
    launched = JITFunction.run

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = launch_of(self, args, kwargs)
        launches[launch] = None
        if launch not in known:
            with _ptxas_heard() as said:
                built = launched(self, *args, grid=grid, warmup=True, **kwargs)
            known[launch] = _checked(launch, capability, built, said.getvalue())

    with mock.patch.object(JITFunction, "run", note):
        run()
    return [known[launch] for launch in launches]


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compiles one launch for `capability` (80, 90, 100 …) and checks it.

    Problems are: register spills (see `_shortage`), ptxas warnings C75xx (serialised wgmma), shared memory over the
    device's limit, row offsets of 32 bits, 16-bit matrix products without the device's own instructions for products
    and copies, and hazards in the machine code (see sass.py).
    """
    with _ptxas_heard() as said:
        built = build(launch, capability)
    return _checked(launch, capability, built, said.getvalue())


def build(launch: Launch, capability: int) -> CompiledKernel:
    """One launch, compiled for `capability` without a GPU."""
    names = [name for name, _ in launch.signature]
    source = (compat.GluonASTSource if launch.kernel.is_gluon() else ASTSource)(
        launch.kernel,
        dict(launch.signature),
        {(names.index(k),): v for k, v in launch.constants},
        {(names.index(k),): [["tt.divisibility", 16]] for k in launch.aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))


def _checked(launch: Launch, capability: int, built: CompiledKernel, said: str) -> Compiled:
    """`built` judged by its code and by what ptxas said."""
    if "Used" not in said:
        raise RuntimeError(f"ptxas said nothing of its registers: {said[:500]!r}")
    gluon, ptx = launch.kernel.is_gluon(), built.asm["ptx"]
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", said)), default=0)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", said))
    shared = int(built.metadata.shared)
    problems = _problems(capability, said, _shortage(spills, registers, gluon, dict(launch.options)), shared)
    if _wants_tensor_cores(launch):
        problems += [f"expected {name} in the code" for name in _EXPECTED.get(capability, ()) if name not in ptx]
    problems += narrow_row_offsets(built.asm["ttgir" if gluon else "ttir"])
    if capability == 90 and "wgmma" in ptx:
        sass = disassemble(built.asm["cubin"])
        problems += rewritten_descriptors(sass) + overwritten_barriers(ptx)
        if gluon and "attention" in launch.name:
            problems += exposed_exponentials(sass)
        problems += _misplaced_ring(launch, ptx)
    return Compiled(launch.describe(), capability, registers, spills, shared, tuple(problems))


def _misplaced_ring(launch: Launch, ptx: str) -> list[str]:
    """Whether instructions find those operands that they look for by address."""
    constants = dict(launch.constants)
    if constants.get("SPARE") or constants.get("SUMMED"):
        needed = placed_bytes(*(constants[name] for name in ("HEAD_DIM", "CONSUMERS", "STAGES", "BY_WARP")))
    elif "transposed" in launch.name:
        config = HopperTransposedConfig(*(constants[name] for name in ("ROWS", "CONSUMERS", "STAGES")))
        needed = config.ring_bytes(constants["IN_PARTS"] > 0)
    elif "alternating" in launch.name:
        needed = HopperAlternatingConfig(constants["ROWS"], constants["STAGES"]).ring_bytes()
    else:
        return []
    said = misplaced_ring(ptx, needed)
    return [said] if said else []


def _shortage(spills: int, registers: int, gluon: bool, options: dict[str, int]) -> int:
    """Bytes of `spills` that tell of a shortage of registers, and not of ptxas's own choice.

    With registers to spare ptxas puts a word or two aside where that lets another block onto the SM: 4 or 8 bytes at
    80 or 128 registers, on sm_80 and sm_100. Gluon's partitions have shares that the number it prints does not show.
    """
    most = min(options.get("maxnreg") or MAX_REGISTERS, REGISTERS_OF_SM // (32 * options.get("num_warps", 4)))
    return spills if gluon or registers >= most or spills > HARMLESS_SPILL else 0


@contextlib.contextmanager
def _ptxas_heard() -> Iterator[io.StringIO]:
    """Inside, everything is compiled anew by Triton's own call of ptxas, whose flags differ between its versions; what
    `ptxas -v` says is collected. A kernel from the cache comes without it."""
    said = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        yield said


def _problems(capability: int, said: str, spills: int, shared: int) -> list[str]:
    problems = []
    if spills:
        problems.append(f"{spills} bytes of spill stores")
    problems += sorted(set(re.findall(r"\(C75\d\d\)[^\n]*", said)))
    limit = MAX_SHARED.get(capability, 227 * 1024)
    if shared > limit:
        problems.append(f"{shared} bytes of shared memory, limit {limit}")
    return problems


def _wants_tensor_cores(launch: Launch) -> bool:
    """Whether 16-bit matrices are read through descriptors, given or made in the kernel."""
    return any(name.endswith("_desc") and ("bf16" in t or "fp16" in t) for name, t in launch.signature)


_CARRIES = (
    tuple(f"arith.{op}" for op in ("addi", "subi", "select", "extsi", "extui"))
    + tuple(f"tt.{op}" for op in ("broadcast", "expand_dims", "splat", "reshape"))
    + ("ttg.convert_layout",)
)


HARMLESS_TENSOR, HARMLESS_SCALAR = 4, 256  # entries of small tables; a tile's or a head's first column


def narrow_row_offsets(ttir: str) -> list[str]:
    """Pointer offsets computed as a 32-bit product: they wrap once a buffer passes 2^31 elements.

    Reads the defining operations back from every `tt.addptr`. Products by a small constant pass: at most
    `HARMLESS_TENSOR` for a vector of offsets, `HARMLESS_SCALAR` for one number.
    """
    ops: dict[str, tuple[str, list[str], str]] = {}
    constants: dict[str, int] = {}
    problems = []
    for line in ttir.splitlines():
        match = re.match(r"\s*(%[\w#]+)(?::\d+)? = \"?([\w.]+)\"?(.*)", line)
        if match is None:
            continue
        name, op, rest = match.groups()
        ops[name] = (op, re.findall(r"%[\w#]+", rest), rest)
        value = re.search(r"arith\.constant (?:dense<)?(-?\d+)>? :", line)
        if value is not None:
            constants[name] = int(value.group(1))
        if op == "tt.addptr":  # at once: the partitions of a warp-specialised kernel use the same names again
            problems += _narrow_products(ops[name][1][1], ops, constants)
    return sorted(set(problems))


def _narrow_products(name: str, ops: dict[str, tuple[str, list[str], str]], constants: dict[str, int]) -> list[str]:
    op, operands, rest = ops.get(name, ("", [], ""))
    if op == "arith.muli" and "i32" in rest:
        limit = HARMLESS_TENSOR if "tensor<" in rest else HARMLESS_SCALAR
        factors = [abs(constants[o]) for o in operands if o in constants]
        return [] if factors and max(factors) <= limit else [f"32-bit row offset: {name} = {op}{rest.strip()}"]
    if op not in _CARRIES:
        return []
    return [p for o in operands for p in _narrow_products(o, ops, constants)]
