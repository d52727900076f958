"""The sources keep the house rules, and each rule is shown to notice a planted violation."""

from pathlib import Path

import pytest

from tests.repo import source_rules as rules

ROOT = Path(__file__).resolve().parents[2]
RULES = [
    rules.wrong_directions,
    rules.wrong_packages,
    rules.wrong_statements,
    rules.private_names,
    rules.cycles,
    rules.too_deep,
    rules.too_long,
    rules.too_many,
]


def plant(root: Path, files: dict[str, str]) -> list[rules.Source]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return rules.read_sources(root)


def function(lines: int, decorator: str = "", docstring: str = "") -> str:
    return decorator + "def f():\n" + docstring + "    x = 1\n" * (lines - 1)


def chain(modules: int) -> dict[str, str]:
    """Files that import one another in a row, `modules` of them."""
    return {f"bench/m{i}.py": f"import fusedvit.bench.m{i + 1}\n" for i in range(modules - 1)} | {
        f"bench/m{modules - 1}.py": ""
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule):
    sources = rules.read_sources(ROOT)
    assert {source.path.split("/")[0] for source in sources} == set(rules.FOLDERS)
    assert list(rule(sources)) == []


def test_no_allowance_is_unused():
    assert list(rules.unused_allowances(rules.read_sources(ROOT))) == []


def test_an_unused_allowance_is_noticed(tmp_path):
    found = [*rules.unused_allowances(plant(tmp_path, {"fusedvit/config.py": "import fusedvit.graphs.limits\n"}))]
    assert "model imports no kernels" in found and "config imports no graphs" not in found


def test_pages_that_are_named_exist():
    assert list(rules.missing_pages(ROOT)) == []


def test_sources_name_no_machine():
    assert list(rules.machine_traces(ROOT)) == []


@pytest.mark.parametrize(
    "rule, files",
    [
        (rules.wrong_directions, {"kernels/a.py": "from fusedvit.model.spec import VisionSpec\n"}),
        (rules.wrong_directions, {"kernels/reference/a.py": "from fusedvit.graphs import b\n"}),
        (rules.wrong_directions, {"graphs/a.py": "from fusedvit.kernels.b import c\n"}),
        (rules.wrong_directions, {"fusedvit/model/a.py": "from fusedvit.runtime.inputs import Item\n"}),
        (rules.wrong_directions, {"fusedvit/model/a.py": "from fusedvit.graphs import side_stream\n"}),
        (rules.wrong_directions, {"fusedvit/runtime/a.py": "from fusedvit.families.base import Family\n"}),
        (rules.wrong_directions, {"fusedvit/runtime/a.py": "from fusedvit.checks import fallback\n"}),
        (rules.wrong_directions, {"fusedvit/families/a.py": "from fusedvit.checks import fallback\n"}),
        (rules.wrong_directions, {"fusedvit/stats.py": "import fusedvit.fused_encoder\n"}),
        (rules.wrong_directions, {"fusedvit/api.py": "from fusedvit.cli.media import load\n"}),
        (rules.wrong_directions, {"fusedvit/fused_encoder.py": "from fusedvit.bench import timing\n"}),
        (rules.wrong_directions, {"fusedvit/model/a.py": "from fusedvit import fuse\n"}),
        (rules.wrong_directions, {"bench/a.py": "from fusedvit.cli.towers import TINY\n"}),
        (rules.wrong_directions, {"fusedvit/serving/a.py": "from fusedvit.bench.towers import build\n"}),
        (rules.wrong_directions, {"fusedvit/cli/a.py": "from fusedvit.serving import sharded\n"}),
        (rules.wrong_directions, {"fusedvit/new_area/a.py": "import torch\n"}),
        (rules.wrong_packages, {"kernels/a.py": "import numpy\n"}),
        (rules.wrong_packages, {"kernels/reference/a.py": "import pandas\n"}),
        (rules.wrong_packages, {"graphs/a.py": "import triton.language as tl\n"}),
        (rules.wrong_packages, {"fusedvit/model/a.py": "def f():\n    from transformers import AutoModel\n"}),
        (rules.wrong_packages, {"fusedvit/cli/a.py": "from transformers import AutoModel\n"}),
        (rules.wrong_statements, {"fusedvit/a.py": "def f():\n    from fusedvit.b import c\n"}),
        (rules.wrong_statements, {"fusedvit/a.py": "from kernels.b import c\n"}),
        (rules.wrong_statements, {"bench/a.py": "import graphs\n"}),
        (rules.wrong_statements, {"fusedvit/a.py": "from . import b\n"}),
        (rules.private_names, {"fusedvit/a.py": "from fusedvit.b import _c\n"}),
        (rules.private_names, {"kernels/a.py": "import fusedvit.kernels.b as b\nb._c()\n", "kernels/b.py": "_c = 1\n"}),
        (rules.private_names, {"bench/a.py": "x._d\n", "graphs/b.py": "class B:\n    def f(self): self._d = 1\n"}),
        (rules.cycles, {"graphs/a.py": "from fusedvit.graphs import b\n", "graphs/b.py": "import fusedvit.graphs.a\n"}),
        (rules.cycles, {"fusedvit/__init__.py": "from fusedvit.a import f\n", "fusedvit/a.py": "import fusedvit\n"}),
        (rules.too_deep, chain(rules.MAX_DEPTH + 1)),
        (rules.too_long, {"graphs/a.py": "x = 1\n" * 801}),
        (rules.too_long, {"graphs/a.py": function(41)}),
        (rules.too_long, {"kernels/a.py": function(121, "@triton.jit\n")}),
        (rules.too_many, {f"bench/m{i}.py": "" for i in range(17)}),
        (rules.too_many, {f"kernels/hopper/m{i}.py": "" for i in range(11)}),
    ],
)
def test_rule_notices_a_violation(tmp_path, rule, files):
    assert len(list(rule(plant(tmp_path, files)))) == 1


def test_rules_allow_what_they_should(tmp_path):
    sources = plant(
        tmp_path,
        {
            "fusedvit/__init__.py": "if TYPE_CHECKING:\n    from fusedvit.api import fuse\n",
            "fusedvit/api.py": "from fusedvit import __version__\n",
            "fusedvit/checkpoint.py": "def load_tower():\n    import transformers\n",
            "fusedvit/runtime/a.py": "from fusedvit.graphs import manager\nfrom fusedvit.model import spec\n",
            "fusedvit/checks/a.py": "from fusedvit.families.base import Family\n_own = 1\nx._own\nparameter._version\n",
            "kernels/a.py": "import os, torch\nfrom fusedvit.kernels.b import c\n" + function(120, "@triton.jit\n"),
            "kernels/b.py": function(41, docstring='    """One\n    two."""\n').replace("    x = 1\n", "", 1),
            "fusedvit/cli/a.py": "from fusedvit.bench import m0\nfrom fusedvit.api import fuse\n",
            **{f"kernels/hopper/m{i}.py": "" for i in range(10)},
            **chain(14),
            "bench/__init__.py": "",
        },
    )
    assert [line for rule in RULES for line in rule(sources)] == []
    assert rules.longest_chain(sources)[:2] == ("fusedvit.cli.a", "fusedvit.bench.m0")
    assert len(rules.longest_chain(sources)) == 15


@pytest.mark.parametrize("line", ["/" + "home/someone/checkpoints", "https://" + "pypi" + ".org/simple"])
def test_machine_traces_notices_a_violation(tmp_path, line):
    plant(tmp_path, {"bench/a.py": f'PATH = "{line}"\n'})
    assert len(list(rules.machine_traces(tmp_path))) == 1


def test_missing_pages_notices_a_violation(tmp_path):
    here, gone = (f"docs/{name}.md" for name in ("here", "gone"))
    plant(tmp_path, {here: "", "kernels/a.py": f"# See {here} and {gone}.\n"})
    assert list(rules.missing_pages(tmp_path)) == [f"kernels/a.py:1: {gone}"]
