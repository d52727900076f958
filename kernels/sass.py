"""Hazards that only compiled code shows, read from PTX or `cuobjdump -sass`."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def overwritten_barriers(ptx: str) -> list[str]:
    """Shared memory that is initialised as a barrier and then holds something else.

    Triton's allocator gives away the memory of a barrier that no partition of a `warp_specialize` refers to, and puts
    there what partitions are handed (the row count). The hardware keeps barriers in a cache of its own, so that without
    `mbarrier.inval` the word is the barrier's still: where a GPU is taken by another process in between, the barrier is
    written back over it. Seen on an H200 shared by three processes: partitions that disagree about the row count, which
    hang. So a kernel initialises what it waits at, and nothing else.
    """
    barriers = {at for at in _barriers(ptx) if at is not None}
    taken: set[int] = set()
    access = r"(?:st|ld)\.shared(?:\.v(\d))?\.[bfsu](\d+)\s[^;]*\[global_smem\+(\d+)\]"
    for vector, bits, address in re.findall(access, ptx):
        taken.update(range(int(address), int(address) + int(vector or 1) * int(bits) // 8))
    return [f"barrier at {b} of shared memory overwritten" for b in sorted(barriers) if taken & set(range(b, b + 8))]


def _barriers(ptx: str) -> list[int | None]:
    """Where in shared memory barriers are initialised; None for one of which that is not seen."""
    base = set(re.findall(r"mov\.[bu]32\s+(%r\d+), global_smem;", ptx))
    at = {name: int(n) for name, of, n in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx) if of in base}
    return [at.get(name) for name in re.findall(r"mbarrier\.init\S+ \[(%r\d+)\]", ptx)]


def misplaced_ring(ptx: str, ring_bytes: int) -> str:
    """Why memory whose products find their operands by address (`kernels.hopper.transposed`, `attention_spare`) may not
    begin where shared memory does, or "".

    Whatever else is in shared memory, barriers and what partitions are handed, must lie behind it.
    """
    barriers = [at or 0 for at in _barriers(ptx)]
    handed = [int(n or 0) for n in re.findall(r"\[global_smem(?:\+(\d+))?\]", ptx)]
    first = min(barriers + handed, default=0)
    inside = re.search(r"mbarrier\.init\S+ \[%r\d+\+\d+\]", ptx)  # those that have their place in the ring's own array
    behind = first >= ring_bytes and (barriers or inside)
    return "" if behind else f"{ring_bytes} bytes of ring, but something lies at {first}"


def rewritten_descriptors(sass: str) -> list[str]:
    """Descriptors of a product written as text (A in registers) restored from ordinary registers behind its back.

    ptxas 12.8 (Triton 3.6) does so in a chain of such products when it spills uniform registers; the hardware then
    reads shared memory anywhere. Seen on an H200 as illegal accesses; ptxas 13.0 compiles the same code rightly.
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
    """Softmax that does not run under a product: exponentials that ptxas moved behind the wait for P V.

    In the main loop of pipelined attention a wait that leaves P V in flight (`gsb0, 0x1` or more: scores are ready)
    comes first, then the exponentials, then the wait for P V (`gsb0, 0x0`). ptxas may hoist the last one above the
    exponentials, since the PTX it is given has no register operands; only the border of a basic block in between keeps
    it from that (a wait for a barrier). The answer stays right; the overlap, a third of the speed, is gone.
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
