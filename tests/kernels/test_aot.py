"""Ahead-of-time compilation: the command passes on what ships, and each of its checks notices a planted fault."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusedvit.bench import ahead_of_time
from fusedvit.kernels.codegen_checks import (
    MAX_SHARED,
    _problems,
    _shortage,
    exposed_exponentials,
    narrow_row_offsets,
    overwritten_barriers,
    rewritten_descriptors,
)
from fusedvit.kernels.launch import Argument, KernelJob
from fusedvit.kernels.linear import _linear_kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROOT = Path(__file__).resolve().parents[2]
PROBES = Path(__file__).with_name("aot_probes.py")


DEBUGGED = """
import triton
from fusedvit.bench.ahead_of_time import TARGETS, launches_of
from fusedvit.kernels.codegen_checks import AbsentGPU
triton.runtime.driver.set_active(AbsentGPU(90))
jobs = launches_of("Qwen3-VL-8B", "bf16", [64], TARGETS[90]).values()
job = next(job for job in jobs if job.name == "_fingerprint_kernel")
print(triton.knobs.runtime.debug, "assertfail" in job.build().asm["ptx"])
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A Python process without the interpreter that these tests run under."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=ROOT, check=False)


def test_command_passes_on_what_ships() -> None:
    """A small part, of one chip; `make aot` has the rest."""
    narrow = ("--alike", "--arch", "80", "--dtype", "bf16", "--tower", "Qwen3-VL-8B", "--budget", "64")
    done = run("-m", "fusedvit.bench.ahead_of_time", *narrow)
    assert done.returncode == 0, done.stderr
    assert "kernels compiled, 0 failed" in done.stderr


def _job(n: int, splits: int, dtype: torch.dtype, eps: float = 1e-6) -> KernelJob:
    constants = {"N": n, "EPS": eps, "SPLITS": splits}
    return KernelJob("fusedvit.kernels.linear", "_linear_kernel", (Argument(dtype),), constants, {"num_warps": 4})


def test_alike_are_sizes_and_16_bit_types_alone() -> None:
    one = ahead_of_time.kind_of(_job(1152, 2, BF16))
    assert one == ahead_of_time.kind_of(_job(4304, 2, FP16))
    others = [_job(1152, 3, BF16), _job(1152, 2, FP32), _job(1152, 2, BF16, 0.0)]
    assert one not in [ahead_of_time.kind_of(other) for other in others]
    assert {"N", "EPS"} < ahead_of_time.SIZES <= set(_linear_kernel.arg_names)


def test_the_first_of_those_alike_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [_job(64, 2, BF16), _job(64, 2, FP16), _job(64, 3, BF16), _job(128, 3, BF16)]
    monkeypatch.setattr(ahead_of_time, "launches_around", lambda _: {})
    monkeypatch.setattr(ahead_of_time, "launches_of", lambda *_: {job.code: job for job in every})
    matrix = ahead_of_time.Matrix((80, 90), ("bf16",), ("Qwen3-VL-8B",), (64,))
    assert ahead_of_time.jobs_of(matrix) == [(job, arch) for arch in (80, 90) for job in every]
    found = ahead_of_time.jobs_of(replace(matrix, alike=True))
    assert len(found) == 4 and all((every[i], arch) in found for arch in (80, 90) for i in (0, 2))


def test_command_refuses_the_interpreter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="2"):
        ahead_of_time.main([])
    assert "TRITON_INTERPRET" in capsys.readouterr().err


MOST_KERNELS = 90  # of the default ladder of Qwen3-VL-8B


def test_what_is_compiled_is_what_whole_towers_launch() -> None:
    """A rehearsal, which leaves blocks out, launches every kernel of a whole tower, of any family and wherever mergers
    run; the default ladder has few kernels, and Triton counts as many."""
    done = run(str(Path(__file__).with_name("aot_launches.py")))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["unlike"] == []
    assert found["kernels"] == found["keys"] <= MOST_KERNELS


@pytest.mark.parametrize("tower, gpu", [("Qwen3-VL-8B", "h100"), ("Qwen2.5-VL-7B", "a100")])
def test_jobs_for_other_processes_have_the_keys_of_the_launches(tower: str, gpu: str) -> None:
    done = run(str(Path(__file__).with_name("aot_jobs.py")), tower, gpu)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["other"] == found["of_order"] == [] and found["keys"] > 30


@pytest.fixture(scope="module")
def probes() -> dict[str, str]:
    """What the checks say of each probe, by its name; empty where they are content."""
    done = run(str(PROBES))
    assert done.returncode == 0, done.stderr
    return dict(line.split("\t", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    "probe, said",
    [
        ("narrow_vector", "32-bit row offset"),
        ("narrow_scalar", "32-bit row offset"),
        ("spills", "bytes of spill stores"),
        ("shared", "bytes of shared memory, limit"),
        ("no_tensor_cores", "expected wgmma.mma_async in the code"),
        ("broken", "Error"),
        ("wide_vector", ""),
        ("wide_scalar", ""),
        ("gluon_narrow", "32-bit row offset"),
        ("gluon_wide", ""),
    ],
)
def test_probe(probes: dict[str, str], probe: str, said: str) -> None:
    assert said in probes[probe] if said else probes[probe] == ""


def test_a_launch_finds_what_was_compiled_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another process's launch, too: nothing more comes into Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = run(str(Path(__file__).with_name("aot_in_place.py")))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [[]] and found["same"]
    assert found["later"] == found["kept"] > 0
    assert found["within"] == 0 and found["after"] == found["kept"]


def test_fingerprints_may_overflow_while_somebody_debugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TRITON_DEBUG=1 Triton's compiler adds an assertion to each sum of integers, and one that fails ends all."""
    monkeypatch.setenv("TRITON_DEBUG", "1")
    done = run("-c", DEBUGGED)
    assert done.stdout.strip() == "True False", done.stderr


def test_problems_are_told_apart() -> None:
    quiet = "ptxas info    : Used 96 registers, 0 bytes spill stores"
    assert _problems(90, quiet, 0, MAX_SHARED[90]) == []
    assert _problems(90, quiet, 0, MAX_SHARED[90] + 1) == [f"232449 bytes of shared memory, limit {MAX_SHARED[90]}"]
    assert _problems(80, quiet, 24, 0) == ["24 bytes of spill stores"]
    serialised = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
    assert len(_problems(90, serialised * 2 + quiet, 0, 0)) == 1


@pytest.mark.parametrize(
    "spills, registers, gluon, options, shortage",
    [
        (8, 128, False, {"num_warps": 4}, 0),
        (20, 128, False, {"num_warps": 4}, 20),
        (8, 255, False, {"num_warps": 8}, 8),
        (8, 128, False, {"num_warps": 16}, 8),
        (8, 96, False, {"num_warps": 4, "maxnreg": 96}, 8),
        (4, 168, True, {"num_warps": 4}, 4),
        (0, 255, False, {}, 0),
    ],
)
def test_spills_with_registers_to_spare(
    spills: int, registers: int, gluon: bool, options: dict[str, int], shortage: int
) -> None:
    assert _shortage(spills, registers, gluon, options) == shortage


PRODUCT = "        /*5ef0*/                   HGMMA.64x16x16.F32.BF16 R56, R112, gdesc[UR4].tnspB, R56 ;\n"
RESTORE = "        /*5f00*/                   R2UR UR6, R152 ;\n"
WAIT = "        /*5f10*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"


INITIALISED = """
	mov.b32 	%r9, global_smem;
	add.s32 	%r10, %r9, 512;
	@%p1 mbarrier.init.shared::cta.b64 [%r10], 1;
	add.s32 	%r11, %r9, 520;
	@%p1 mbarrier.init.shared::cta.b64 [%r11], 1;
"""


@pytest.mark.parametrize(
    "access, found",
    [
        ("st.shared.b32 	[global_smem+524], %r5;", ["barrier at 520 of shared memory overwritten"]),
        ("ld.shared.b32 	%r5, [global_smem+512];", ["barrier at 512 of shared memory overwritten"]),
        (
            "st.shared.v4.b32 	[global_smem+504], {%r1, %r2, %r3, %r4};",
            ["barrier at 512 of shared memory overwritten"],
        ),
        ("st.shared.v2.b32 	[global_smem+528], {0, 7};", []),
        ("st.shared.b64 	[global_smem+504], %rd5;", []),
    ],
)
def test_overwritten_barriers(access: str, found: list[str]) -> None:
    """Plain data where a barrier was."""
    assert overwritten_barriers(f"{INITIALISED}	{access}\n") == found


@pytest.mark.parametrize(
    "sass, found",
    [
        (PRODUCT + RESTORE, ["UR6 restored behind an asynchronous product"]),
        (PRODUCT + RESTORE * 2, ["UR6 restored behind an asynchronous product"]),
        (PRODUCT.replace("64x16x16", "64x72x16") + RESTORE, ["UR6 restored behind an asynchronous product"]),
        (PRODUCT + WAIT + RESTORE, []),  # the hardware has read it
        (PRODUCT + RESTORE.replace("UR6", "UR8"), []),  # a descriptor is four registers: UR4 to UR7
        (RESTORE + PRODUCT, []),
        (PRODUCT.replace("64x16x16", "64x64x16") + RESTORE, []),  # wider products: never seen to fail
        (PRODUCT.replace("R112, ", "") + RESTORE, []),  # A in shared memory
        ("", []),
    ],
)
def test_rewritten_descriptors(sass: str, found: list[str]) -> None:
    assert rewritten_descriptors(sass) == found


SCORES = WAIT.replace("0x0", "0x1")
EXP = "        /*5f20*/                   MUFU.EX2 R24, R24 ;\n"


def loop(body: str) -> str:
    """SASS of a loop: instructions get addresses from 0x1000 on."""
    lines = [re.sub(r"/\*[0-9a-f]{4}\*/", f"/*{0x1000 + 16 * i:04x}*/", x) for i, x in enumerate(body.splitlines())]
    return "\n".join([*lines, f"        /*{0x1000 + 16 * len(lines):04x}*/              @P1 BRA 0x1000 ;"])


@pytest.mark.parametrize(
    "sass, found",
    [
        (SCORES + EXP * 64 + WAIT, []),
        (SCORES + WAIT + EXP * 64, ["0 exponentials between the waits for scores and for P V"]),
        (SCORES + EXP * 2 + WAIT + EXP * 62, ["2 exponentials between the waits for scores and for P V"]),
        (WAIT + EXP * 64 + WAIT, []),  # nothing in flight: not pipelined
        ("", []),
    ],
)
def test_exposed_exponentials(sass: str, found: list[str]) -> None:
    assert exposed_exponentials(loop(sass)) == found
    assert exposed_exponentials(sass) == [], "not a loop"


def test_narrow_row_offsets_reads_through_casts_and_constants() -> None:
    ttir = """
      %c1152_i32 = arith.constant 1152 : i32
      %c4_i32 = arith.constant 4 : i32
      %row = tt.get_program_id x : i32
      %narrow = arith.muli %row, %c1152_i32 : i32
      %small = arith.muli %row, %c4_i32 : i32
      %late = arith.extsi %narrow : i32 to i64
      %wide = arith.extsi %row : i32 to i64
      %far = arith.muli %wide, %c : i64
      %0 = tt.addptr %p, %PICK : !tt.ptr<f32>, i32
    """
    for pick, bad in {"narrow": True, "small": False, "late": True, "wide": False, "far": False}.items():
        assert bool(narrow_row_offsets(ttir.replace("PICK", pick))) is bad, pick
