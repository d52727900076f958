"""What needs processes of its own: switches, other releases and platforms, several ranks, the command, the wheel."""

import json
import os
import subprocess
import sys
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SITE = Path(str(distribution("vllm").locate_file("")))
OLDEST = Path(
    os.environ.get("FUSEDVIT_OLDEST_VLLM", "missing")
)  # the Python files of vLLM 0.26.0, as `make` unpacks them


def run(*arguments: str, path: tuple[Path, ...] = (), timeout: int = 400, **environment: str) -> str:
    """Standard output and errors of a Python process."""
    paths = [*map(str, path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    given = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    ended = subprocess.run(
        [sys.executable, *arguments],
        env=given,
        text=True,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


def document(output: str) -> dict:
    return json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))


def oldest() -> Path:
    if not OLDEST.is_dir():
        pytest.skip("FUSEDVIT_OLDEST_VLLM names no folder: `make test-serving` unpacks it")
    return OLDEST


@pytest.mark.parametrize("custom_ops", ["none", "all"])
def test_on_cuda(custom_ops: str) -> None:
    found = document(run(str(HERE / "cuda_platform.py"), custom_ops, VLLM_TARGET_DEVICE=""))
    assert found.pop("vllm") == "0.33.0" and "FLASH_ATTN" in found.pop("backend")
    assert len(found) == 7 and set(found.values()) == {"None"}, found


@pytest.mark.parametrize("custom_ops", ["none", "all"])
def test_the_oldest_release_on_cuda(custom_ops: str) -> None:
    found = document(run(str(HERE / "cuda_platform.py"), custom_ops, path=(oldest(),), VLLM_TARGET_DEVICE=""))
    assert found.pop("vllm") == "0.26.0" and "FLASH_ATTN" in found.pop("backend")
    assert len(found) == 7 and set(found.values()) == {"None"}, found


LOADED = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer as tower
print("wrapped" if hasattr(tower.__init__, "__wrapped__") else "plain")
"""


@pytest.mark.parametrize(
    "switch, expected",
    [
        ({}, "wrapped"),
        ({"FUSEDVIT_DISABLE": "1"}, "plain"),
        ({"FUSEDVIT_DISABLE": "False"}, "wrapped"),
        ({"VLLM_PLUGINS": "another"}, "plain"),
    ],
)
def test_switches(switch: dict[str, str], expected: str) -> None:
    assert run("-c", LOADED, **switch).split()[-1] == expected


def test_data_parallel() -> None:
    arguments = ("-m", "fusedvit.bench.engines.vllm_ranks", str(SITE), "data", "--tower", "tiny", "--rounds", "1")
    found = document(run(*arguments))
    assert found["holds"] and found["same bits"] and found["ranks fused"] == 2 and found["parity"]["passed"]


TOGETHER = (
    *("parity", "start", "differences", "judged", "sleep", "fails_on_one", "part_fails_on_one", "without_weights"),
    *("replicated", "not_noted", "not_noted_on_one", "forbidden_here", "in_half", "refused_on_one"),
    *("strict_where_forbidden", "asked"),
)


def in_ranks(*scenarios: str, **environment: str) -> str:
    """What two ranks print in which these scenarios hold, one after another."""
    output = run(str(HERE / "sharded.py"), *scenarios, timeout=900, **environment)
    held = [output.count(f": {scenario} holds") for scenario in scenarios]
    assert held == [2] * len(scenarios), output[-3000:]
    return output


def test_sharded_weights() -> None:
    """In processes that live on: what goes wrong in one scenario leaves the next one whole."""
    assert "shards of 2 GPUs gathered" in in_ranks(*TOGETHER)


@pytest.mark.parametrize("first", [{}, {"FIRST_CALL": "1"}], ids=["a later call", "the first call"])
def test_a_rank_that_is_late(first: dict[str, str]) -> None:
    """It breaks the connection between the processes."""
    in_ranks("delay", **first)


SOURCES = """
from fusedvit.serving.vllm_gemma import wrong_model
from vllm.model_executor.models.gemma4_mm import Gemma4ForConditionalGeneration as model
print(repr(wrong_model(model)))
"""


def test_the_oldest_releases_gemma_is_known() -> None:
    assert run("-c", SOURCES, path=(oldest(),)).split()[-1] == "''"


def test_sharded_weights_that_shall_not_be_gathered() -> None:
    output = in_ranks("forbidden", FUSEDVIT_CONFIG='{"gather_sharded": false}')
    assert output.count("with --mm-encoder-tp-mode data every GPU runs it fused") == 1, output[-3000:]


def test_the_command() -> None:
    arguments = ("bench", "--vllm", str(SITE), "--tower", "tiny", "--workload", "1 x 224 px", "--seconds", "0.1")
    found = json.loads(run("-m", "fusedvit", *arguments, "--json", "-").split("\n{", 1)[-1].join(["{", ""]))
    assert found["vllm"]["version"] == "0.33.0"


@pytest.mark.parametrize("home", [SITE, OLDEST], ids=["newest", "oldest"])
def test_the_plugin_changes_no_other_package(home: Path) -> None:
    """vLLM's pins lie within what fusedvit takes; transformers it pins to a range, of which fusedvit takes some."""
    if home == OLDEST:
        oldest()
    (metadata,) = home.glob("vllm-*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    pins = {r.name: r for r in (Requirement(x[15:]) for x in lines if x.startswith("Requires-Dist: "))}
    ours = {
        r.name: r for r in map(Requirement, requires("fusedvit") or ()) if not (r.marker and "extra" in str(r.marker))
    }
    assert {"torch", "transformers", "einops"} <= ours.keys() & pins.keys()
    for name in ours.keys() & pins.keys():
        for bound in pins[name].specifier:
            if bound.operator == "==":
                assert ours[name].specifier.contains(bound.version), f"{name}: vLLM {bound}, ours {ours[name]}"
    both = pins["transformers"].specifier & ours["transformers"].specifier
    assert any(both.contains(f"5.{minor}.2") for minor in range(30))


def test_pip_installs_nothing_else() -> None:
    """Beside what is installed here, of which each package is one that vLLM takes."""
    output = run("-m", "pip", "install", "--dry-run", "--no-build-isolation", "--no-index", str(ROOT))
    changed = [line.split()[2:] for line in output.splitlines() if line.startswith("Would install")]
    assert all(len(names) == 1 and names[0].startswith("fusedvit-") for names in changed), output
