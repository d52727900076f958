"""Forms checked in a process of their own: right, wrong, crashed, endless."""

import json
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fusedvit.bench import guard  # noqa: E402
from fusedvit.bench.workloads import WORKLOADS  # noqa: E402
from fusedvit.kernels.backends import BackendFailed  # noqa: E402

BEGINS = json.dumps({"begins": "linear/hopper", "of": "fc2"})
DONE = json.dumps({"done": True})
RIGHT = json.dumps({"backend": "linear/hopper", "problem": ""})
WRONG = json.dumps({"backend": "linear/hopper", "problem": "max error 3 is over 1"})
NEXT = json.dumps({"begins": "attention/hopper", "of": "attention"})


def process(lines: list[str], end: str) -> list[str]:
    said = "".join(f"print({line!r}, flush=True)\n" for line in lines)
    return [sys.executable, "-c", f"import os, time\n{said}{end}"]


@pytest.mark.parametrize(
    "lines, end, problems, right, complete",
    [
        ([BEGINS, RIGHT, DONE], "", {}, 1, True),
        ([BEGINS, WRONG, BEGINS, RIGHT, DONE], "", {"linear/hopper": "max error 3 is over 1"}, 1, True),
        (
            [BEGINS, RIGHT, "said by a library", NEXT],
            "os._exit(7)",
            {"attention/hopper": "ended its process with code 7"},
            1,
            False,
        ),
        ([BEGINS, RIGHT, NEXT], "time.sleep(60)", {"attention/hopper": "did not end within 8 s"}, 1, False),
        ([BEGINS, RIGHT], "time.sleep(60)", {}, 1, False),  # too slow between two checks: nobody's fault
        ([], "raise RuntimeError", {}, 0, False),
    ],
)
def test_who_is_to_blame(lines: list[str], end: str, problems: dict[str, str], right: int, complete: bool) -> None:
    # An interpreter starts meanwhile, on a machine that may be busy.
    assert guard.once(process(lines, end), 8.0) == guard.Guarded(problems, right, complete)


def test_what_a_form_has_ended_is_run_again_without_it() -> None:
    """The first backend kills the process, the second raises, the third is right."""
    script = (
        "import json, os, sys\n"
        "left = [f for f in 'abc' if f not in sys.argv]\n"
        "for f in left:\n"
        "    print(json.dumps({'begins': f}), flush=True)\n"
        "    if f == 'a': os._exit(3)\n"
        "    assert f != 'b'\n"
        "    print(json.dumps({'backend': f, 'problem': ''}))\n"
        "print(json.dumps({'done': True}))\n"
    )
    found = guard.guarded([sys.executable, "-c", script], 30.0)
    died = "ended its process with code {}"
    assert found == guard.Guarded({"a": died.format(3), "b": died.format(1)}, 1, True)


def test_the_sizes_are_the_workloads() -> None:
    words = guard.command(["tiny"], WORKLOADS.values())
    assert words[1:5] == ["-m", "fusedvit.bench.guard", "--tower", "tiny"]
    assert words[6:] == ["256", "784", "1344", "4096", "6336", "7168", "16384", "28672"]


@pytest.fixture
def nothing_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other forms than plain Triton are absent under the interpreter."""
    monkeypatch.setattr(guard, "TRUSTED", "")


def test_every_launch_is_checked_once(nothing_trusted: None, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("asks what happens without a GPU")
    assert guard.main(["--tower", "tiny", "--rows", "64", "64"]) == 0
    *records, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    begun = [record["of"].split()[1] for record in records if "begins" in record]
    assert begun == ["patch", "qkv", "proj", "fc1", "fc2", "merger_fc1", "merger_fc2", "attention"]
    assert [record["problem"] for record in records if "backend" in record] == [""] * len(begun)
    assert last == {"done": True}


def test_plain_triton_is_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("asks what happens without a GPU")
    assert guard.main(["--tower", "tiny", "--rows", "64"]) == 0
    assert json.loads(capsys.readouterr().out) == {"done": True}


def test_a_form_that_raises_has_a_problem(nothing_trusted: None) -> None:
    def fail(config: Any) -> Any:
        raise BackendFailed("attention in its hopper backend: no")

    cpu, dtype = torch.device("cpu"), torch.bfloat16
    (job,) = [j for j in guard.jobs("tiny", [64], dtype, cpu) if j.task.name == "attention"]
    case = job.make()
    broken = guard.Job(job.tower, job.task, job.shape, lambda: type(case)(case.run, fail, 1, case.cost, {}))
    _, record = guard.check(broken, dtype, cpu, set())
    assert record == {"backend": "attention/triton", "problem": "attention in its hopper backend: no"}
