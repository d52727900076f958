"""The sources keep the house rules, and each rule is shown to notice a planted violation."""

from pathlib import Path

import pytest

from tests.repo import source_rules as rules

ROOT = Path(__file__).resolve().parents[2]
LONG = "x = 1\n" * 801
RULES = [rules.wrong_directions, rules.wrong_forms, rules.cycles, rules.too_long]


def plant(root: Path, files: dict[str, str]) -> list[rules.Source]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return rules.read_sources(root)


def function(lines: int, decorator: str = "", docstring: str = "") -> str:
    return decorator + "def f():\n" + docstring + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule):
    sources = rules.read_sources(ROOT)
    assert {source.folder for source in sources} >= {"fusedvit", "kernels"}
    assert list(rule(sources)) == []


def test_sources_name_no_machine():
    assert list(rules.machine_traces(ROOT)) == []


@pytest.mark.parametrize(
    "rule, files",
    [
        (rules.wrong_directions, {"kernels/a.py": "from fusedvit.model.spec import VisionSpec\n"}),
        (rules.wrong_directions, {"kernels/a.py": "import numpy\n"}),
        (rules.wrong_directions, {"kernels/reference/a.py": "from fusedvit.graphs import b\n"}),
        (rules.wrong_directions, {"graphs/a.py": "from fusedvit.kernels.b import c\n"}),
        (rules.wrong_directions, {"graphs/a.py": "import triton.language as tl\n"}),
        (rules.wrong_directions, {"fusedvit/model/encoder.py": "def f():\n    from transformers import AutoModel\n"}),
        (rules.wrong_directions, {"fusedvit/model/encoder.py": "from fusedvit.cli.media import load\n"}),
        (rules.wrong_forms, {"fusedvit/a.py": "def f():\n    from fusedvit.b import c\n"}),
        (rules.wrong_forms, {"fusedvit/a.py": "from kernels.b import c\n"}),
        (rules.wrong_forms, {"bench/a.py": "import graphs\n"}),
        (rules.wrong_forms, {"fusedvit/a.py": "from . import b\n"}),
        (rules.cycles, {"graphs/a.py": "from fusedvit.graphs import b\n", "graphs/b.py": "import fusedvit.graphs.a\n"}),
        (rules.cycles, {"fusedvit/__init__.py": "from fusedvit.a import f\n", "fusedvit/a.py": "import fusedvit\n"}),
        (rules.too_long, {"graphs/a.py": LONG}),
        (rules.too_long, {"graphs/a.py": function(41)}),
        (rules.too_long, {"kernels/a.py": function(121, "@triton.jit\n")}),
    ],
)
def test_rule_notices_a_violation(tmp_path, rule, files):
    assert len(list(rule(plant(tmp_path, files)))) == 1


def test_rules_allow_what_they_should(tmp_path):
    sources = plant(
        tmp_path,
        {
            "fusedvit/__init__.py": "if TYPE_CHECKING:\n    from fusedvit.api import fuse\n",
            "fusedvit/api.py": "from fusedvit import __version__\ndef fuse():\n    import transformers\n",
            "kernels/a.py": "import os, torch\nfrom fusedvit.kernels.b import c\n" + function(120, "@triton.jit\n"),
            "kernels/b.py": function(41, docstring='    """One\n    two."""\n').replace("    x = 1\n", "", 1),
            "bench/a.py": "import transformers\nfrom fusedvit.api import fuse\n",
        },
    )
    assert [line for rule in RULES for line in rule(sources)] == []


@pytest.mark.parametrize("line", ["/" + "home/someone/checkpoints", "https://" + "pypi" + ".org/simple"])
def test_machine_traces_notices_a_violation(tmp_path, line):
    plant(tmp_path, {"bench/a.py": f'PATH = "{line}"\n'})
    assert len(list(rules.machine_traces(tmp_path))) == 1
