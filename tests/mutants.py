"""`python -m tests.mutants --json bench/results/cpu-mutants.json`: does each guard have a test that misses it?

A mutant is one line of the sources made wrong. Each is planted in a copy of the checkout, and the tests that should
notice run on it: one that leaves them green is listed as `survived`, and the program exits with 1. A process forks for
each mutant, so that torch and transformers are imported once. Some 4 s a mutant on one core.
"""

import argparse
import datetime
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("fusedvit", "graphs", "kernels", "bench", "tests")
HEAVY = ("torch", "transformers", "triton", "numpy", "hypothesis", "einops", "peft", "accelerate")


def planted(copy: Path, mutant: Mutant) -> str:
    """Plants `mutant` in the checkout at `copy`; returns the file's text without it.

    Raises:
        ValueError: what it replaces is not there once.
    """
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.guard}: {mutant.file} has {mutant.old!r} {text.count(mutant.old)} times, expected 1")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return text


def is_noticed(copy: Path, tests: str) -> bool:
    """Whether a test of `tests` fails on the checkout at `copy`, in a process of its own."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    code = 70
    try:
        code = _run(copy, tests)
    finally:
        os._exit(code)


def _run(copy: Path, tests: str) -> int:
    import pytest

    os.chdir(copy)
    sys.path[:] = [str(copy), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [n for n in sys.modules if n.partition(".")[0] in ("fusedvit", "tests")]:
        del sys.modules[name]
    log = os.open(copy / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    trust = importlib.import_module("tests.trust")
    chosen = list(trust.Fault("", tests).tests)
    files = sorted({test.partition("::")[0] for test in chosen})
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files, "-k", trust.selected(chosen)]))


def tried(mutants: list[Mutant]) -> Iterator[tuple[Mutant, str, float]]:
    """Each mutant, "caught" or "survived", and the seconds it took."""
    sys.dont_write_bytecode = True
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for mutant in mutants:
            begin = time.monotonic()
            text = planted(copy, mutant)
            caught = is_noticed(copy, mutant.tests)
            (copy / mutant.file).write_text(text, encoding="utf-8")
            yield mutant, "caught" if caught else "survived", time.monotonic() - begin


def document(outcomes: dict[str, str], path: Path | None) -> dict[str, Any]:
    """What was found so far, as docs/trust.md takes it."""
    survived = sum(outcome == "survived" for outcome in outcomes.values())
    counts = {"mutants": len(outcomes), "caught": len(outcomes) - survived, "wrong": survived}
    found = {"passport": _records().passport("python -m tests.mutants", {"--json": path}), "trust": {"mutants": counts}}
    return found | {"date": datetime.date.today().isoformat(), "outcomes": outcomes}


def _known(path: Path | None) -> dict[str, str]:
    """Outcomes that the document at `path` has of this commit."""
    if path is None or not path.exists():
        return {}
    there = json.loads(path.read_text(encoding="utf-8"))
    return there["outcomes"] if there["passport"]["commit"] == _records().commit_of(ROOT) else {}


def _records() -> Any:
    return importlib.import_module("fusedvit.bench.records")  # not before triton knows that it interprets


def main(argv: list[str] | None = None) -> int:
    """Exits with 1 where a mutant survived.

    What the document at `--json` has as caught at this commit is not tried again. What it has of another commit says
    nothing: a guard that went, or tests that moved, leave a mutant alive.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where outcomes go; without it they are only printed")
    parser.add_argument("--only", default="", help="a part of a guard's name")
    args = parser.parse_args(argv)
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    known = _known(args.json)
    outcomes = {m.guard: known[m.guard] for m in MUTANTS if m.guard in known}
    wanted = [m for m in MUTANTS if args.only in m.guard and outcomes.get(m.guard) != "caught"]
    for mutant, outcome, seconds in tried(wanted):
        outcomes[mutant.guard] = outcome
        print(f"{outcome:8} {seconds:5.1f} s  {mutant.guard}", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(document(outcomes, args.json), indent=1) + "\n", encoding="utf-8")
    survived = [guard for guard, outcome in outcomes.items() if outcome == "survived"]
    print(json.dumps({"mutants": len(outcomes), "survived": survived}))
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
