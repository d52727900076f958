"""What can be shown of the Triton kernels without a GPU: they are interpreted, and compiled ahead of time.

Each in a process of its own, since Triton decides between the two when kernels are imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

ARCH = 90
SECONDS = 120


@dataclass(frozen=True)
class KernelCheck:
    """One check in words, with the values behind it."""

    what: str
    passed: bool
    detail: str
    values: dict[str, Any]


def run(step: Callable[[str], None]) -> list[KernelCheck]:
    """Both checks; none where Triton is not installed."""
    if find_spec("triton") is None:
        return []
    step("one block in Triton's interpreter")
    checks = [interpreted_block()]
    step(f"compiling every kernel for sm_{ARCH}")
    return [*checks, compiled_kernels()]


def interpreted_block() -> KernelCheck:
    """The kernels of a one-block tower under Triton's interpreter, against the original by the tolerance rule."""
    what = "one block in Triton's interpreter"
    outputs, error = _json_of(["fusedvit.cli.interpreted"], {"TRITON_INTERPRET": "1"})
    if outputs is None:
        return KernelCheck(what, False, error, {})
    failed = [f"{name}: {verdict['reason']}" for name, verdict in outputs.items() if not verdict["passed"]]
    worst = max(float(verdict["ratio_max"]) for verdict in outputs.values())
    detail = "; ".join(failed) or f"{len(outputs)} outputs, largest error {worst:.2f} times the original's"
    return KernelCheck(what, not failed, detail, outputs)


def compiled_kernels() -> KernelCheck:
    """Every kernel that Qwen3-VL-8B's tower launches in bf16, in every configuration, compiled for sm_90."""
    what = f"Qwen3-VL-8B's kernels for sm_{ARCH}"
    command = [
        "fusedvit.runtime.ahead_of_time",
        "--arch",
        str(ARCH),
        "--tower",
        "hd72",
        "--dtype",
        "bf16",
        "--jobs",
        "2",
        "--json",
        "-",
    ]
    summary, error = _json_of(command, {"TRITON_INTERPRET": "0"})
    if summary is None:
        return KernelCheck(what, False, error, {})
    compiled, failed = summary["compiled"], summary["failed"]
    problems = "; ".join(sorted({problem for result in summary["results"] for problem in result["problems"]}))
    detail = f"{compiled} compiled" if not failed else f"{failed} of {compiled} with problems: {problems[:200]}"
    return KernelCheck(what, not failed, detail, summary)


def _json_of(module: list[str], variables: dict[str, str]) -> tuple[Any, str]:
    """What `python -m module` prints, parsed; or None and the last line of its complaint."""
    command = [sys.executable, "-m", *module]
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None, f"took longer than {SECONDS} s"
    if not done.stdout.strip():
        complaint = done.stderr.strip().split("\n")[-1]
        return None, f"exit code {done.returncode}: {complaint[:200]}"
    return json.loads(done.stdout), ""
