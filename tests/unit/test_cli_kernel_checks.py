"""The demo's checks of kernels without a GPU: processes of their own, which end in time and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("triton")
pytest.importorskip("transformers")

import fusedvit  # noqa: E402
from fusedvit.cli import kernel_checks, towers  # noqa: E402
from fusedvit.cli.kernel_checks import FAILED, NOT_RUN, OK, KernelCheck  # noqa: E402
from tests.support.waiting import alive, until  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Has the processes run a program of the test's own, which finds `arguments` as the real one does."""

    def use(program: str) -> None:
        code = f"from fusedvit.cli import kernel_checks\n{program}\nkernel_checks.main(sys.argv[1:])"
        path = tmp_path / "stand_in.py"
        path.write_text(f"import json, os, subprocess, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n{code}\n")
        real = subprocess.Popen

        def popen(command: list[str], **options: Any) -> Any:
            return real([command[0], str(path), *command[3:]], **options)

        monkeypatch.setattr(kernel_checks.subprocess, "Popen", popen)

    return use


def test_one_block_in_the_interpreter() -> None:
    with kernel_checks._worker("interpret") as worker:
        worker.process.wait(timeout=300)
        check = kernel_checks.interpreted_check(worker)
    assert check.outcome == OK, check.detail
    assert set(check.values) == {"pooler_output", "last_hidden_state", "deepstack_features[0]"}


def _checks(step: Any, seconds: float) -> list[KernelCheck]:
    with kernel_checks.started() as finish:
        return finish(step, seconds)


ENDED = SimpleNamespace(returncode=0)
QUICK = "kernel_checks.interpreted_block = lambda: {'a': {'passed': True, 'ratio_max': 1.0}}\n"


def test_what_compiles_is_counted(stand_in: Any) -> None:
    stand_in(QUICK + "kernel_checks.compile_part = lambda part, parts: [{'problems': []}] * (part + 1)")
    steps: list[str] = []
    interpreted, compiled = _checks(steps.append, 100)
    assert (interpreted.outcome, compiled.outcome, compiled.detail) == (OK, OK, "3 kernels")
    assert steps and all("kernels compiled for sm_90" in step for step in steps)


def test_a_problem_fails() -> None:
    """Of any process, whatever the others found; none is needed for it."""
    done = [
        SimpleNamespace(documents=lambda problems=problems: [{"problems": problems}], running=False, process=ENDED)
        for problems in ([], ["spills"])
    ]
    compiled = kernel_checks.compiled_check(done)
    assert (compiled.outcome, compiled.detail) == (FAILED, "spills")


def test_a_process_that_dies_fails(stand_in: Any) -> None:
    stand_in("kernel_checks.interpreted_block = lambda: 1 / 0\nkernel_checks.compile_part = lambda part, parts: 1 / 0")
    for check in _checks(lambda text: None, 100):
        assert check.outcome == FAILED and "ZeroDivisionError" in check.detail


def test_what_there_is_no_time_for_is_not_run_and_leaves_nothing(stand_in: Any, tmp_path: Path) -> None:
    child = f"child = subprocess.Popen(['sleep', '600']); open({str(tmp_path)!r} + f'/{{child.pid}}', 'w').close()"
    wait = f"def wait(*arguments):\n    {child}\n    time.sleep(600)\n    yield\n"
    stand_in(f"{wait}kernel_checks.interpreted_block = lambda: list(wait())\nkernel_checks.compile_part = wait")
    begin = time.monotonic()

    def until_all_wait(text: str) -> None:
        while len(list(tmp_path.glob("[0-9]*"))) < 3 and time.monotonic() - begin < 100:
            time.sleep(0.1)

    checks = _checks(until_all_wait, 0.5)
    assert [check.outcome for check in checks] == [NOT_RUN, NOT_RUN] and all(check.passed for check in checks)
    pids = [int(path.name) for path in tmp_path.glob("[0-9]*")]
    assert len(pids) == 3
    until(lambda: not any(map(alive, pids)))  # what the processes had started is killed too


def test_processes_die_with_what_started_them() -> None:
    """Even if that is killed and runs no `finally`."""
    child = "from fusedvit.cli.kernel_checks import die_with; import os, sys, time; die_with(int(sys.argv[1])); "
    child += "print(os.getpid(), flush=True); time.sleep(600)"
    parent = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]).wait()"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not alive(pid))


def test_outcomes() -> None:
    assert [KernelCheck("x", outcome, "", {}).passed for outcome in (OK, NOT_RUN, FAILED)] == [True, True, False]


def test_kernel_calls_of_a_fused_tower() -> None:
    tower = towers.random_tower(torch.device("cpu")).model  # which the handle does not keep
    handle = fusedvit.fuse(tower)
    calls = kernel_checks.kernel_calls(handle)
    depth, mergers = towers.TINY["depth"], 1 + len(towers.TINY["deepstack_visual_indexes"])
    assert calls["linear"] == 1 + 4 * depth + 2 * mergers
    assert calls["attention"] == depth
    assert calls["layer_norm"] == 2 * depth + mergers, "not folded in fp32"
    assert calls["vision_metadata"] == calls["fingerprint"] == 1
