"""Checks of compiled kernels: registers, spills, warnings, shared memory, row offsets, hazards in PTX and SASS.

`compile_job` compiles a job that `launch.record` has noted for a compute capability, without a GPU, and checks it.
`compile_in_place` compiles for the current GPU exactly as a launch would, so that the launch itself compiles nothing.
"""

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from fusedvit.kernels.hopper.attention_configs import smem_layout_bytes
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig
from fusedvit.kernels.hopper.gluon_compat import barrier_offsets, misplaced_operands
from fusedvit.kernels.launch import Argument, KernelJob, record
from fusedvit.kernels.tile_configs import Target

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MAX_REGISTERS, REGISTERS_OF_SM = 255, 65536
HARMLESS_SPILL = 16  # bytes per thread, where ptxas had registers to spare
MAX_SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # bytes
_EXPECTED = {  # the instructions of a 16-bit product, and of the copies of its operands
    **dict.fromkeys((80, 86, 89), ("mma.sync", "cp.async.cg")),
    90: ("wgmma.mma_async", "cp.async.bulk.tensor"),
    100: ("tcgen05.mma", "cp.async.bulk.tensor"),
    120: ("mma.sync", "cp.async.bulk.tensor"),
}


@dataclass(frozen=True)
class Compiled:
    """The compilers' findings about one job. `problems` is empty if it may ship."""

    launch: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    problems: tuple[str, ...]


# GPUs by name, to plan or compile for where none of them is present.
GPUS: dict[str, tuple[int, int, str]] = {  # capability, SMs, the driver's name: tuning tables are found by it
    "a100": (80, 108, "NVIDIA A100-SXM4-80GB"),
    "a30": (80, 56, "NVIDIA A30"),
    "a10": (86, 72, "NVIDIA A10"),
    "a10g": (86, 80, "NVIDIA A10G"),
    "a40": (86, 84, "NVIDIA A40"),
    "a6000": (86, 84, "NVIDIA RTX A6000"),
    "rtx-3090": (86, 82, "NVIDIA GeForce RTX 3090"),
    "l4": (89, 58, "NVIDIA L4"),
    "l40s": (89, 142, "NVIDIA L40S"),
    "rtx-4090": (89, 128, "NVIDIA GeForce RTX 4090"),
    "rtx-6000-ada": (89, 142, "NVIDIA RTX 6000 Ada Generation"),
    "h20": (90, 78, "NVIDIA H20"),
    "h100": (90, 132, "NVIDIA H100 80GB HBM3"),
    "h100-pcie": (90, 114, "NVIDIA H100 PCIe"),
    "h200": (90, 132, "NVIDIA H200"),
    "gh200": (90, 132, "NVIDIA GH200 480GB"),
    "b200": (100, 148, "NVIDIA B200"),
    "rtx-5090": (120, 170, "NVIDIA GeForce RTX 5090"),
    "rtx-pro-6000": (120, 188, "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
}


def target_named(gpu: str) -> Target:
    """The target of one of `GPUS`.

    Raises:
        ValueError: there is no GPU of that name.
    """
    if gpu not in GPUS:
        raise ValueError(f"no GPU {gpu!r}; there are {', '.join(GPUS)}")
    capability, sms, name = GPUS[gpu]
    return Target(capability, sms, MAX_SHARED[capability], name)


@dataclass(frozen=True)
class AbsentGPU:
    """A Triton driver for a GPU of `capability` (90) that is not there, in processes that compile and launch nothing:
    `triton.runtime.driver.set_active(AbsentGPU(90))`."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps the kernels of each device apart

    def get_current_stream(self, device: int) -> int:
        return 0


def describe(job: KernelJob) -> str:
    """One line that tells this job from its siblings."""
    constants = " ".join(f"{k}={v}" for k, v in job.constants.items() if v is not None)
    dtypes = sorted({str(a.dtype)[6:] for a in job.arguments if isinstance(a, Argument) and a.dtype.is_floating_point})
    return f"{job.name} {','.join(dtypes)} {constants} {job.options}"


def compile_in_place(run: Callable[[], object], capability: int, known: dict[object, Compiled]) -> list[Compiled]:
    """Compiles the kernels that `run()` would launch on the current GPU, of the given capability, and checks them.

    Triton keeps the kernels in this process and in its cache on disk, where later launches find them.

    Args:
        known: earlier findings of this process, by `KernelJob.code`; new ones are added.
    """
    jobs = record(run)
    for code, job in jobs.items():
        if code not in known:
            known[code] = _checked(job, capability, job.build)
    return [known[code] for code in jobs]


def compile_job(job: KernelJob, capability: int) -> Compiled:
    """Compiles one job for `capability` (80, 90, 100 …) and checks it.

    Problems are: register spills (see `_shortage`), ptxas warnings C75xx (serialised wgmma), shared memory over the
    device's limit, row offsets of 32 bits, 16-bit matrix products without the device's own instructions for products
    and copies, and hazards that only PTX or SASS show.
    """
    return _checked(job, capability, lambda: build(job, capability))


def build(job: KernelJob, capability: int) -> CompiledKernel:
    """One job, compiled for `capability` without a GPU; from then on Triton's driver is an `AbsentGPU`."""
    triton.runtime.driver.set_active(AbsentGPU(capability))
    job.kernel().device_caches.clear()  # a kernel of this process would come without ptxas's output
    return job.build()


def _checked(job: KernelJob, capability: int, build: Callable[[], CompiledKernel]) -> Compiled:
    """The findings about what `build` compiles for `job`, from its code and from ptxas's output."""
    with _ptxas_heard() as heard:
        built = build()
    said = heard.getvalue()
    if "Used" not in said:
        raise RuntimeError(f"ptxas said nothing of its registers: {said[:500]!r}")
    gluon, ptx = job.kernel().is_gluon(), built.asm["ptx"]
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", said)), default=0)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", said))
    shared = int(built.metadata.shared)
    problems = _problems(capability, said, _shortage(spills, registers, gluon, job.options), shared)
    if _wants_tensor_cores(job):
        problems += [f"expected {name} in the code" for name in _EXPECTED.get(capability, ()) if name not in ptx]
    problems += narrow_row_offsets(built.asm["ttgir" if gluon else "ttir"])
    if capability == 90 and "wgmma" in ptx:
        sass = disassemble(built.asm["cubin"])
        problems += rewritten_descriptors(sass) + overwritten_barriers(ptx)
        if gluon and "attention" in job.name:
            problems += exposed_exponentials(sass)
        problems += _misplaced_operands(job, ptx)
    return Compiled(describe(job), capability, registers, spills, shared, tuple(problems))


def _misplaced_operands(job: KernelJob, ptx: str) -> list[str]:
    """A problem if operands that instructions find by address do not lie where they must."""
    constants = job.constants
    if constants.get("SPARE") or constants.get("SUMMED"):
        needed = smem_layout_bytes(*(constants[name] for name in ("HEAD_DIM", "CONSUMERS", "STAGES", "BY_WARP")))
    elif "swap_ab" in job.name:
        config = HopperSwapABConfig(*(constants[name] for name in ("ROWS", "CONSUMERS", "STAGES")))
        needed = config.pipeline_bytes(constants["IN_PARTS"] > 0)
    else:
        return []
    said = misplaced_operands(ptx, needed)
    return [said] if said else []


def _shortage(spills: int, registers: int, gluon: bool, options: dict[str, int]) -> int:
    """Bytes of `spills` that are due to a shortage of registers, not to ptxas's own choice.

    With registers to spare, ptxas spills a word or two if that lets another block onto the SM: 4 or 8 bytes at 80 or
    128 registers, on sm_80 and sm_100. Gluon's partitions have shares of registers that ptxas's number does not show.
    """
    most = min(options.get("maxnreg") or MAX_REGISTERS, REGISTERS_OF_SM // (32 * options.get("num_warps", 4)))
    return spills if gluon or registers >= most or spills > HARMLESS_SPILL else 0


@contextlib.contextmanager
def _ptxas_heard() -> Iterator[io.StringIO]:
    """A context that recompiles everything by Triton's own call of ptxas (its flags differ between Triton's versions)
    and collects the output of `ptxas -v`. A kernel from the cache would come without that output."""
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
    limit = MAX_SHARED[capability]
    if shared > limit:
        problems.append(f"{shared} bytes of shared memory, limit {limit}")
    return problems


def _wants_tensor_cores(job: KernelJob) -> bool:
    """Whether 16-bit matrices are read through descriptors."""
    named = zip(job.kernel().arg_names, job.arguments, strict=False)
    return any(isinstance(a, Argument) and name.endswith("_desc") and a.dtype.itemsize == 2 for name, a in named)


def disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def overwritten_barriers(ptx: str) -> list[str]:
    """Shared memory that is initialised as a barrier and then holds other data.

    Triton's allocator reuses the memory of a barrier that no partition of a `warp_specialize` refers to, for the
    arguments of partitions (the row count). The hardware keeps barriers in a cache of its own, and without
    `mbarrier.inval` the memory remains the barrier's: if another process takes the GPU in between, the barrier is
    written back over the data. Seen on an H200 shared by three processes: partitions disagreed about the row count and
    hung. So a kernel must initialise no barrier that it does not wait at.
    """
    barriers = {at for at in barrier_offsets(ptx) if at is not None}
    taken: set[int] = set()
    access = r"(?:st|ld)\.shared(?:\.v(\d))?\.[bfsu](\d+)\s[^;]*\[global_smem\+(\d+)\]"
    for vector, bits, address in re.findall(access, ptx):
        taken.update(range(int(address), int(address) + int(vector or 1) * int(bits) // 8))
    return [f"barrier at {b} of shared memory overwritten" for b in sorted(barriers) if taken & set(range(b, b + 8))]


def rewritten_descriptors(sass: str) -> list[str]:
    """Descriptors of a product in inline assembly (A in registers) restored from ordinary registers while it runs.

    ptxas 12.8 (Triton 3.6) does so in a chain of such products when it spills uniform registers; the hardware then
    reads arbitrary shared memory. Seen on an H200 as illegal accesses; ptxas 13.0 compiles the same code correctly.
    """
    problems = set()
    held: range = range(0)
    for line in sass.splitlines():
        product = re.search(r"HGMMA\.64x(?:16|24|72)x16\.\S+ R\d+, R\d+, gdesc\[UR(\d+)\]", line)
        restored = re.search(r"\*/\s+R2UR UR(\d+), R\d+", line)
        if product is not None:
            held = range(int(product.group(1)), int(product.group(1)) + 4)
        elif "WARPGROUP" in line:
            held = range(0)
        elif restored is not None and int(restored.group(1)) in held:
            problems.add(f"UR{restored.group(1)} restored behind an asynchronous product")
    return sorted(problems)


def exposed_exponentials(sass: str) -> list[str]:
    """Softmax that is not overlapped with a product: exponentials that ptxas moved behind the wait for P V.

    In the main loop of pipelined attention a wait that leaves P V in flight (`gsb0, 0x1` or more: scores are ready)
    comes first, then the exponentials, then the wait for P V (`gsb0, 0x0`). ptxas may hoist the last one above the
    exponentials, since its PTX has no register operands; only the border of a basic block in between (a wait for a
    barrier) prevents that. The result stays right, but the overlap, a third of the speed, is lost.
    """
    return sorted({problem for body in _innermost_loops(sass) for problem in _exposed(body)})


def _innermost_loops(sass: str) -> list[list[str]]:
    """Instructions between the target of each branch backwards and the branch, where no other such pair lies within."""
    code = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)
    at = {int(address, 16): i for i, (address, _) in enumerate(code)}
    spans = []
    for i, (_, instruction) in enumerate(code):
        target = re.search(r"\bBRA 0x([0-9a-f]+)", instruction)
        first = at.get(int(target.group(1), 16), i) if target else i
        if first < i:
            spans.append((first, i))
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return [[instruction for _, instruction in code[a : b + 1]] for a, b in inner]


def _exposed(body: list[str]) -> list[str]:
    problems = []
    partial = False
    exponentials = 0
    for instruction in body:
        wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", instruction)
        if wait is None:
            exponentials += "MUFU.EX2" in instruction
            continue
        if partial and int(wait.group(1), 16) == 0 and exponentials < 16:
            problems.append(f"{exponentials} exponentials between the waits for scores and for P V")
        partial, exponentials = int(wait.group(1), 16) > 0, 0
    return problems


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
