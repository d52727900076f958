"""Kernels compiled by other processes: what the calling process compiles is nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("how", ["graphs", "eager"])
def test_calls_switch_over_and_compile_nothing_themselves(tmp_path: Path, how: str) -> None:
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.background", how]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["compiled"] == [], "compiled by a call"
    assert found["original"].keys() == {"kernels not ready"} and found["fused"] >= 6 and found["same"]
    assert done.stderr.count("kernels not ready") == 1
