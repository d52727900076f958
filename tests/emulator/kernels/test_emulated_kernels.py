"""Kernels as compiled for an H200, run without a GPU: see `tests/emulator`. On another Triton: PYTHONPATH."""

import json

import pytest
import triton

from fusedvit.kernels.tuning_table import SHIPPED
from tests.kernels.test_aot import run


def says_right(least: int, *command: str) -> None:
    """So many cases or more."""
    done = run("-m", *command)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.count("right: ") >= least, done.stdout


@pytest.mark.parametrize("head_dim, dtype", [(72, "bf16"), (80, "bf16"), (64, "bf16"), (128, "bf16"), (72, "fp16")])
def test_attention(head_dim: int, dtype: str) -> None:
    """Every schedule that ships; of one head size those besides that a tuner may choose, and more inputs."""
    command = ("tests.emulator.kernels.attention", "--head-dim", str(head_dim), "--dtype", dtype)
    if (head_dim, dtype) == (72, "bf16"):
        says_right(13, *command, "--variants", "--cases", "1")
    else:
        says_right(2 if head_dim == 128 else 3, *command, "--short")


@pytest.mark.parametrize(
    "backend, dtype, cases",
    [
        ("hopper", "bf16", 19),
        ("swap_ab", "bf16", 12),
        ("swap_ab", "fp16", 4),
        ("triton", "bf16", 8),
    ],
)
def test_products(backend: str, dtype: str, cases: int) -> None:
    """Every kind of tile and epilogue; in fp16, which changes the types of a few instructions, some."""
    command = ("tests.emulator.kernels.linear", "--backend", backend, "--dtype", dtype)
    says_right(cases, *command, *(["--short"] if dtype == "fp16" else []))


def test_what_the_tables_choose() -> None:
    """On the Triton that the tables were measured with alone: it takes minutes."""
    passports = [json.loads(path.read_text(encoding="utf-8"))["passport"] for path in SHIPPED.glob("*.json")]
    versions = {passport["triton_version"] for passport in passports}
    if versions != {triton.__version__}:
        pytest.skip(f"tables were measured with Triton {', '.join(versions)}")
    says_right(16, "tests.emulator.kernels.tuned")


def test_a_kernel_without_one_of_its_waits_arrivals_or_fences_is_noticed() -> None:
    says_right(7, "tests.emulator.kernels.faults")
