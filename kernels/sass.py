"""Hazards that only the machine code shows, read from `cuobjdump -sass`."""

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


def rewritten_descriptors(sass: str) -> list[str]:
    """Descriptors of a 16-wide product (A in registers) restored from ordinary registers behind its back.

    ptxas 12.8 (Triton 3.6) does so in a chain of such products when it spills uniform registers; the hardware then
    reads shared memory anywhere. Seen on an H200 as illegal accesses; ptxas 13.0 compiles the same code rightly.
    """
    problems = set()
    held: range = range(0)
    for line in sass.splitlines():
        product = re.search(r"HGMMA\.64x16x16\.\S+ R\d+, R\d+, gdesc\[UR(\d+)\]", line)
        restored = re.search(r"\*/\s+R2UR UR(\d+), R\d+", line)
        if product is not None:
            held = range(int(product.group(1)), int(product.group(1)) + 4)
        elif "WARPGROUP" in line:
            held = range(0)
        elif restored is not None and int(restored.group(1)) in held:
            problems.add(f"UR{restored.group(1)} restored behind an asynchronous 16-wide product")
    return sorted(problems)


def exposed_exponentials(sass: str) -> list[str]:
    """Softmax that does not run under a product: exponentials that ptxas moved behind the wait for P V.

    In the main loop of pipelined attention a wait that leaves P V in flight (`gsb0, 0x1` or more: scores are ready)
    comes first, then the exponentials, then the wait for P V (`gsb0, 0x0`). ptxas may hoist the last one above the
    exponentials, since the PTX it is given has no register operands; only the border of a basic block in between keeps
    it from that (a wait for a barrier). The answer stays right; the overlap, a third of the speed, is gone.
    """
    problems = []
    partial = False
    exponentials = 0
    for line in sass.splitlines():
        wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", line)
        if wait is None:
            exponentials += "MUFU.EX2" in line
            continue
        if partial and int(wait.group(1), 16) == 0 and exponentials < 16:
            problems.append(f"{exponentials} exponentials between the waits for scores and for P V")
        partial, exponentials = int(wait.group(1), 16) > 0, 0
    return sorted(set(problems))
