"""README and docs/: their examples, tables, links and paths are those of the code."""

import ast
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.bench import report
from fusedvit.bench.workloads import PATCH, WORKLOADS
from fusedvit.config import FuseConfig
from fusedvit.families.base import Family
from fusedvit.families.registry import FAMILIES, family_of
from fusedvit.kernels import tuning_table
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime.captured_encoder import limits_for
from tests.support.families import TINY, class_of
from tests.support.graphs_on_cpu import GRID, Case, case  # noqa: F401  # a fixture
from tests.support.towers import Call

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
QWEN2 = "Qwen2VisionTransformerPretrainedModel"
IMPORTS = ast.Import, ast.ImportFrom
MAX_LINES = {"README.md": 170, "kernels.md": 250}


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows_of(text: str) -> list[list[str]]:
    """Cells of every table row, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [i for i, row in enumerate(rows) if set("".join(row)) <= set("-: ")]
    return [row for i, row in enumerate(rows) if i not in rules and i + 1 not in rules]


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def example() -> Family:
    (code,) = re.findall(r"```python\n(.*?)```", page("docs/families.md"), re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, "docs/families.md", "exec"), found)
    return found["FAMILIES"][0]


NAME = re.compile(r"(?<![\w./-])fusedvit(?:\.[A-Za-z_]\w*)+")


def test_names_of_the_package_exist() -> None:
    """All that pages write as `fusedvit.a.b`: public names and those of `pixels` after `import fusedvit` alone."""
    pages = [page.read_text(encoding="utf-8") for page in PAGES if page.name != "CHANGELOG.md"]
    names = {name for text in pages for name in NAME.findall(text)}
    assert names > {"fusedvit.fuse", "fusedvit.pixels.swap"}
    for name in names:
        if not name.startswith(("fusedvit.serving.", "fusedvit.bench.engines.")):
            pkgutil.resolve_name(name)
            continue
        parts = name.split(".")  # the module's engine need not be here
        assert importlib.util.find_spec(".".join(parts[: 4 if "engines" in parts else 3])), name
    at_once = {name for name in names if name.count(".") == 1 and name[9:] in fusedvit.__all__}
    at_once |= {name for name in names if name.startswith("fusedvit.pixels")}
    program = f"import fusedvit\nfor name in {sorted(at_once)}: eval(name)\nassert 'pixels' in dir(fusedvit)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_help_names_every_argument() -> None:
    """Of public functions, and of methods of public classes, that have a list of arguments."""
    homes = [getattr(home, name) for home in (fusedvit, fusedvit.pixels) for name in home.__all__]
    classes = [home for home in homes if inspect.isclass(home)]
    methods = [value for cls in classes for name, value in vars(cls).items() if name[0] != "_" or name == "__call__"]
    unwrapped = [getattr(value, "__func__", value) for value in [*homes, *methods]]
    missing = []
    for function in filter(inspect.isfunction, unwrapped):
        _, found, rest = (inspect.getdoc(function) or "").partition("Args:\n")
        listed = re.findall(r"^    (\w[\w, ]*):", rest.partition("\n\n")[0], re.MULTILINE)
        names = {name for line in listed for name in line.split(", ")}
        missing += [(function, {*inspect.signature(function).parameters} - {"self"} - names)] if found else []
    assert len(missing) >= 10
    assert [(function, names) for function, names in missing if names] == []


def test_the_example_is_the_code_of_its_file() -> None:
    (code,) = re.findall(r"```python\n(.*?)\)\n```", page("docs/families.md"), re.DOTALL)  # less the tuple's own end
    file = page("fusedvit/families/qwen2.py")
    parts = [part.strip("\n") for part in code.split("\n\n")]
    lines = [line for part in parts if "import" in part for line in part.splitlines()]  # the file imports more
    assert [part for part in [*lines, *(part for part in parts if "import" not in part)] if part not in file] == []


def test_the_example_is_the_registered_record() -> None:
    written, registered = example(), family_of(QWEN2)
    assert registered is not None
    config = class_of(QWEN2).config_class(**TINY[QWEN2][1])
    assert written.spec_from_config(config) == registered.spec_from_config(config)
    for field in fields(Family):
        if field.name != "spec_from_config":
            assert getattr(written, field.name) == getattr(registered, field.name), field.name


@pytest.mark.parametrize("record, name", [(VisionSpec, "families"), (Family, "families"), (FuseConfig, "using")])
def test_every_field_is_named(record: Any, name: str) -> None:
    text = page(f"docs/{name}.md")
    assert [field.name for field in fields(record) if not re.search(rf"\b{field.name}\b", text)] == []


def test_every_counter_has_a_unit(case: Case) -> None:  # noqa: F811
    """Those that repeat an option need none."""
    part = page("docs/using.md").split("### Counters")[1].split("## Exit codes")[0]
    named = {name for cells in rows_of(part) for name in re.findall(r"\w+", cells[0])}
    tower, handle, _ = case
    call = Call.of(tower, GRID)
    tower(call.pixels, grid_thw=call.grid)
    counted = handle.stats()
    options = {field.name for field in fields(FuseConfig)}
    assert {*counted, *counted["graphs"]} - options <= named
    assert named <= {*counted, *counted["graphs"]}


def test_the_tuning_table_holds(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", page("docs/tuning.md"), re.DOTALL)
    (tmp_path / "table.json").write_text(example, encoding="utf-8")
    table = tuning_table.read(tmp_path / "table.json", "NVIDIA H200")
    assert len(table.entries) == 1 and table.stale == ()


def test_every_family_is_in_the_support_matrix() -> None:
    part = page("README.md").split("## Support")[1].split("## What falls back")[0]
    listed = ", ".join(cells[0] for cells in rows_of(part)).replace(" to ", ", ")
    names = [name for family in FAMILIES for name in re.split(r", ", family.name)]
    missing = [name for name in names if name not in listed and name not in ("4.5V",)]  # within GLM-4.1V to 4.6V
    assert missing == []


def test_memory_is_what_was_measured() -> None:
    said = report.load(report.VLLM)["report"]
    weights, buffers = re.findall(r"prepared weights ([\d.]+) MiB, static buffers ([\d.]+) MiB", said)[0]
    ((budgets, largest),) = re.findall(r"(\d+) token budgets from \d+ to (\d+)", said)
    part = page("README.md").split("## Memory and the first call")[1]
    assert f"| {float(weights):.0f} MiB |" in part and f"| {float(buffers):.0f} MiB |" in part
    assert f"up to {largest} output tokens" in part
    assert f"{budgets} token budgets up to {largest}" in page("docs/serving.md")


def test_graphs_are_as_many_as_captured() -> None:
    specs = [VisionSpec(1, 64, 1, 64, 64, 64, 16, merge_size=side) for side in (2, 3)]
    most, gemma = (len(limits_for(spec, torch.bfloat16, 2**34).token_budgets) for spec in specs)
    assert f"ladder up to it has {most} graphs ({gemma} of Gemma 4)" in " ".join(page("docs/using.md").split())


def test_the_mixed_workload() -> None:
    (_, side, _), (steps, frame, _), *images = WORKLOADS["mixed"]
    said = f"an image of {side * PATCH} px, a video of {2 * steps} frames of {frame * PATCH} px, and images of "
    said += " and ".join(f"{h * PATCH} x {w * PATCH}" for _, h, w in images)
    assert f"*mixed* is {said} px" in " ".join(page("docs/performance.md").split())


def test_figures_of_byte_times_are_those_of_their_document() -> None:
    """The page has them in a sentence, which nothing generates."""
    measured = report.load("h100-byte-times.json")["ms"]
    ms = [measured[f"1 x {side} px"] for side in (224, 448)]
    before, more = [each["plain, bf16 (wall)"] for each in ms], [each["bf16 (wall)"] for each in ms]
    added = " and ".join(f"{1000 * (b - a):.0f}" for a, b in zip(before, more, strict=True))
    calls = " and ".join(f"{a:.2f}" for a in before)
    assert f"cost {added} µs of wall time in calls of {calls} ms" in " ".join(page("docs/pixels.md").split())


def test_every_place_is_in_the_table_of_directories() -> None:
    places = [p for p in (ROOT / "fusedvit").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    text = page("docs/architecture.md").partition("## Directories")[2].partition("## Import")[0]
    assert [p.name for p in places if not p.name.startswith("_") and p.name not in text] == []


def test_every_example_compiles() -> None:
    for path in PAGES:
        for code in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            compile(code, str(path), "exec")


def names_in(code: str) -> tuple[set[str], set[str], set[str]]:
    """Names that code imports, binds in another way, and reads."""
    nodes = list(ast.walk(ast.parse(code)))
    imported = {name.asname or name.name for node in nodes if isinstance(node, IMPORTS) for name in node.names}
    bound = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return imported, bound, {node.id for node in names if isinstance(node.ctx, ast.Load)}


def test_examples_use_what_they_import() -> None:
    for path in PAGES:
        for code in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            imported, _, read = names_in(code)
            assert imported <= read, path.name


def test_the_seams_example_imports_what_it_uses() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", page("docs/serving.md").split("## The seam")[1], re.DOTALL)
    imported, bound, read = names_in(code)
    of_the_engine = {"tower", "vision_config", "config"}
    assert read - imported - bound - of_the_engine == set()
    imports = [line for line in code.splitlines() if line.startswith(("from ", "import "))]
    exec("\n".join(imports), {})


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        linked = (path.parent / target) if target else path
        assert linked.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), f"{path.name}: {target}#{anchor}"
    named = re.findall(r"`((?:fusedvit|tests|bench|kernels|graphs)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name, most", MAX_LINES.items())
def test_length(name: str, most: int) -> None:
    (path,) = (path for path in PAGES if path.name == name)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= most


def test_shards_are_read_in_the_jobs_order(tmp_path: Path) -> None:
    """Also past the five digits that their names begin with."""
    pytest.importorskip("pyarrow")
    from fusedvit.corpus import shards

    numbers = [0, 10_000, 10_001, 99_999, 100_000, 1_000_010]
    for number in numbers:
        shards._folder(tmp_path, number).mkdir()
    (loop,) = re.findall(r"^for shard in (.*):$", page("docs/corpus.md"), re.MULTILINE)
    found = eval(loop, {"Path": lambda out: tmp_path})
    assert list(found) == [shards._folder(tmp_path, number) for number in numbers]
