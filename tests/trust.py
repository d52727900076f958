"""`python -m tests.trust --json bench/results/cpu-trust.json`: which tests stand for which fault, and how many pass.

Runs the tests below once, and writes a row for each fault: docs/trust.md is made of these rows and of the documents
that `bench.graph_stress` and `bench.sanitize` write on a GPU (`python -m fusedvit.bench.report`). `--only F29 F30` runs
the tests of some faults and keeps what the document says of the others.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from fusedvit.bench.records import passport, write

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    """What can go wrong, what looks for it on a CPU, and the checks that do so on a GPU.

    Attributes:
        on_cpu: files of tests, less `test_`; after a colon the beginning of a test's name.
    """

    name: str
    on_cpu: str
    on_gpu: str = ""

    @property
    def tests(self) -> tuple[str, ...]:
        """As pytest names them."""
        return tuple(map(_selector, self.on_cpu.split()))


def _selector(short: str) -> str:
    file, _, test = short.partition(":")
    folder, _, stem = file.rpartition("/")
    return f"tests/{folder}/test_{stem}.py" + (f"::test_{test}" if test else "")


FAULTS = {
    "F1": Fault(
        "an output changes after its call",
        "hf/outputs:held_outputs_never_change hf/weights:held_outputs_survive_a_refresh",
        "held_outputs",
    ),
    "F2": Fault(
        "metadata of an earlier call",
        "unit/speculative_replay:other_layouts unit/encoder:buffers_serve_one_call_after_another",
        "equal_totals",
    ),
    "F3": Fault(
        "padding reaches real rows",
        "unit/family_encoders:buffers_of_a_budget_and_nan unit/encoder:nothing_past_the_capacity_is_needed",
        "graph_equals_eager",
    ),
    "F4": Fault(
        "a length of the capture is baked into a graph",
        "unit/encoder:buffers_serve_one_call_after_another",
        "graph_equals_eager",
    ),
    "F5": Fault(
        "32-bit offsets overflow",
        "kernels/aot:narrow_row_offsets_reads_through_casts_and_constants kernels/aot:probe",
        "long_videos",
    ),
    "F6": Fault("a capture beside other work", "", "captures_under_load"),
    "F7": Fault(
        "threads and streams",
        "hf/outputs:threads hf/weights:threads_after_a_change unit/graphs/capture",
        "threads_and_streams",
    ),
    "F8": Fault("memory pools", "unit/graphs/manager", "captures_under_load"),
    "F9": Fault("out of memory in a capture", "unit/graphs/manager", "out_of_memory"),
    "F10": Fault(
        "gradient and inference modes",
        "hf/state:one_mode_after_another hf/state:training_is_hugging_faces hf/state:weights_change_between_modes",
    ),
    "F11": Fault("devices", "hf/fallback:several_devices hf/accelerate:a_tower_hooked", "towers_on_two data_parallel"),
    "F12": Fault("weights change after fuse", "hf/weights"),
    "F13": Fault(
        "copies and files",
        "hf/state:state_dict_is_the_same hf/state:save_and_reload hf/state:copies_are_fused hf/state:unfuse_gives_back",
    ),
    "F14": Fault("bad input", "unit/items", "hostile_grids"),
    "F15": Fault("NaN or Inf in pixels", "hf/outputs:bad_pixels_stay_in_their_item", "bad_pixels"),
    "F16": Fault(
        "more tokens, items or frames than a graph holds",
        "unit/graphs/packing unit/speculative_replay:what_overflows_runs_item_by_item",
    ),
    "F17": Fault("a huge video", "unit/graphs/packing", "long_videos"),
    "F18": Fault("compiling in steady state", "kernels/aot:what_is_compiled_is_what_whole_towers_launch", "soak"),
    "F19": Fault("a cache without a bound", "unit/graphs/packing:remembers_a_bounded_number_of_layouts", "soak"),
    "F20": Fault("a graph and an eager run differ", "unit/one_budget", "graph_equals_eager"),
    "F21": Fault("accuracy", "hf/families:tolerance_rule"),
    "F22": Fault("races", "unit/encoder:run_to_run_the_same_bits emulator/parts:races", "repeats"),
    "F23": Fault("out of bounds", "emulator/parts:only_a_launchs_tensors_can_be_reached", "memcheck"),
    "F24": Fault("memory and latency drift", "", "soak"),
    "F25": Fault("LoRA, hooks, attentions, training", "hf/fallback hf/changes hf/adapters"),
    "F26": Fault("empty batches, items without frames", "hf/outputs:empty_batch hf/outputs:item_without_frames"),
    "F27": Fault("untrusted files", "kernels/tuning_table unit/pixels/media"),
    "F28": Fault("a guard that no test looks at", "unit/graphs/plan_rules", "mutants"),
    "F29": Fault("code that is not transformers' own", "hf/own_code"),
    "F30": Fault("structure or numbers change", "hf/numbers hf/changes hf/layouts"),
    "F31": Fault(
        "weights prepared without asking",
        "hf/numbers:every_way_to_prepared_weights hf/numbers:content_that_changed",
    ),
    "F32": Fault("a write to part of a weight", "unit/fingerprint_coverage hf/weights:small_writes"),
    "F33": Fault("whose handle it is", "hf/handles", "data_parallel"),
    "F34": Fault("memory that moves or is freed", "hf/memory", "sharded"),
    "F35": Fault("outputs that share storage", "hf/memory:outputs_are_tensors_of_their_own kernels/store_outputs"),
    "F36": Fault("memory kept", "hf/memory:memory_goes hf/unread_in_models:what_is_read"),
    "F37": Fault("transforms", "hf/transforms"),
    "F38": Fault("hook registries replaced", "hf/fallback:hooks_in_a_registry_that_was_replaced"),
    "F39": Fault("remote code under a known name", "hf/own_code:remote_code"),
    "F40": Fault("a large common mean", "hf/large_mean"),
    "F41": Fault(
        "silently slow",
        "hf/autocast hf/arguments hf/compiled hf/accelerate "
        "hf/lazy_outputs hf/unread_states hf/unread_in_models:a_whole",
    ),
    "F42": Fault("messages that name nothing", "hf/messages hf/changes"),
}


def outcomes(tests: list[str]) -> list[tuple[str, str, float]]:
    """(file::function, "passed" or "failed" or "skipped", seconds) of each test that these selectors choose.

    A selector is a file, or a file and the beginning of a function's name.
    """
    files = sorted({test.partition("::")[0] for test in tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
        subprocess.run([*command, "-k", selected(tests)], cwd=ROOT, check=False)
        cases = ElementTree.parse(report).iter("testcase")
        return [(_name(case), _outcome(case), float(case.get("time", 0))) for case in cases]


def selected(tests: list[str]) -> str:
    """What pytest's `-k` selects by: whole files, or beginnings of names within a file."""
    parts = []
    for test in tests:
        file, _, name = test.partition("::")
        stem = Path(file).name
        parts.append(f"({stem} and {name})" if name else stem)
    return " or ".join(dict.fromkeys(parts))


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').partition('[')[0]}"


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def unmeasured(fault: Fault) -> dict[str, Any]:
    """The row of a fault whose tests did not run yet."""
    return {"fault": fault.name, "tests": list(fault.tests), "gpu": fault.on_gpu.split()}


def rows(wanted: list[str]) -> dict[str, Any]:
    """By fault: its name, its tests, how many passed and did not, the checks on a GPU."""
    found = outcomes([test for fault in wanted for test in FAULTS[fault].tests])
    date = datetime.date.today().isoformat()
    made = {}
    for key in wanted:
        fault = FAULTS[key]
        mine = [case for case in found if case[0].startswith(fault.tests or ("no test",))]
        counts = Counter(outcome for _, outcome, _ in mine)
        seconds = round(sum(took for _, _, took in mine), 1)
        made[key] = unmeasured(fault) | {"date": date}
        made[key] |= {"passed": counts["passed"], "failed": counts["failed"], "skipped": counts["skipped"]}
        made[key] |= {"seconds": seconds}
    return made


def main(argv: list[str] | None = None) -> int:
    """Exits with 1 where a test failed, or a fault's tests are none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the counts go; without it they are only printed")
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), metavar="FAULT")
    parser.add_argument("--commit", default="", help="recorded as it is; read from git when left out")
    args = parser.parse_args(argv)
    there = args.only and args.json is not None and args.json.exists()
    kept = json.loads(args.json.read_text(encoding="utf-8"))["rows"] if there else {}
    new = rows(args.only or list(FAULTS))
    document = {"passport": passport("python -m tests.trust", {"--json": args.json}, args.commit)}
    document["rows"] = {key: (kept | new).get(key, unmeasured(fault)) for key, fault in FAULTS.items()}
    write(args.json, document)
    for key, row in new.items():
        print(key, *(f"{row[count]} {count}" for count in ("passed", "failed", "skipped")))
    wrong = {key: row for key, row in new.items() if row["failed"] or (row["tests"] and not row["passed"])}
    print(json.dumps(wrong, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
