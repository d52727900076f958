"""Tuning tables: read strictly, laid over each other, left out with one warning where they do not hold."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.backends import Key
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig, wrong_hopper_gemm
from fusedvit.kernels.tile_configs import AttentionConfig, LinearConfig, Target
from fusedvit.kernels.tuning_table import Table, TableError
from fusedvit.runtime.ahead_of_time import QWEN3_VL_8B
from fusedvit.stats import choices

BF16 = torch.bfloat16
H200 = Target(name="NVIDIA H200")
KEY = Key("linear", "norm+rope", 3456, 1152, 1024, "bfloat16")
HEADS = Key("attention", "", 16, 72, 1024, "bfloat16")
CONFIG, ATTENTION = LinearConfig(128, 64, 64, 4, 3), AttentionConfig(128, 64, 8, 2)


def entry(key: Key = KEY, chosen: Any = CONFIG, **changes: Any) -> dict[str, Any]:
    return {**asdict(key), "backend": "triton", "config": asdict(chosen), "us": 12.5, **changes}


def document(*entries: dict[str, Any], **passport: Any) -> dict[str, Any]:
    sources = {f"{backend.op}/{backend.name}": tuning_table.fingerprint(backend) for backend in backends.BACKENDS}
    return {
        "passport": {"gpu": "NVIDIA H200", "triton": tuning_table.TRITON, "sources": sources} | passport,
        "entries": list(entries),
    }


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvidia-h200.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(the user's folder, the shipped one), both empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning_table, "SHIPPED", tmp_path / "shipped")
    tuning_table.forget()
    yield tuning_table.user_folder(), tmp_path / "shipped"
    tuning_table.forget()


def test_a_table_is_read_back(tmp_path: Path) -> None:
    path = write(tmp_path, document(entry(), entry(HEADS, ATTENTION)))
    table = tuning_table.read(path, "NVIDIA H200")
    assert table.entries == {KEY: CONFIG, HEADS: ATTENTION} and not table.stale
    assert table.find(KEY, H200, BF16) == CONFIG
    assert table.find(Key("linear", "norm+rope", 3456, 1152, 2048, "bfloat16"), H200, BF16) is None


BAD = {
    "no JSON": ("{", "not JSON"),
    "a list": ([], "expected 'passport'"),
    "no passport": ({"entries": []}, "expected 'passport'"),
    "another GPU": (document(gpu="NVIDIA A100"), "made on 'NVIDIA A100', this is 'NVIDIA H200'"),
    "entries no list": ({**document(), "entries": {}}, "entries must be list, got dict"),
    "no backend": (document({**asdict(KEY), "config": {}}), "entry 0: expected 'backend'"),
    "rows as text": (document(entry(rows="1024")), "rows must be int, got str"),
    "rows as bool": (document(entry(rows=True)), "rows must be int, got bool"),
    "odd dtype": (document(entry(dtype="int8")), "dtype must be one of"),
    "unknown field": (document(entry(config={**asdict(CONFIG), "block_z": 3})), "LinearConfig has no block_z"),
    "missing field": (document(entry(config={"block_m": 64})), "entry 0: LinearConfig"),
    "field of another type": (document(entry(config={**asdict(CONFIG), "block_m": 64.0})), "block_m must be int"),
    "flag as int": (document(entry(config={**asdict(CONFIG), "flatten": 1})), "flatten must be bool, got int"),
}


@pytest.mark.parametrize("content, said", BAD.values(), ids=BAD)
def test_a_malformed_table_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(TableError) as error:
        tuning_table.read(path, "NVIDIA H200")
    assert said in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("content, said", BAD.values(), ids=BAD)
def test_a_malformed_table_is_warned_of_once(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, content: Any, said: str
) -> None:
    write(folders[0], content)
    with caplog.at_level(logging.WARNING, "fusedvit"):
        assert tuning_table.table_for(H200) == tuning_table.table_for(H200) == Table()
    (record,) = caplog.records
    assert said in record.getMessage() and "heuristics used instead" in record.getMessage()


def test_the_users_table_goes_over_the_shipped_one(folders: tuple[Path, Path]) -> None:
    user, shipped = folders
    write(shipped, document(entry(), entry(HEADS, ATTENTION)))
    assert tuning_table.table_for(H200).entries[KEY] == CONFIG
    mine = LinearConfig(64, 64, 128, 4, 3)
    write(user, document(entry(chosen=mine)))
    assert tuning_table.table_for(H200).entries[KEY] == CONFIG, "read once a process"
    tuning_table.forget()
    assert tuning_table.table_for(H200).entries == {KEY: mine, HEADS: ATTENTION}
    write(user, "{")
    tuning_table.forget()
    assert tuning_table.table_for(H200).entries == {KEY: CONFIG, HEADS: ATTENTION}, "the shipped one still holds"


@pytest.mark.parametrize("whose, level", [("own", logging.WARNING), ("shipped", logging.INFO)])
def test_another_triton_makes_a_table_stale(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, whose: str, level: int
) -> None:
    """That the table we ship is for another one is nobody's fault: no warning; the report says it."""
    write(folders[whose == "shipped"], document(entry(), triton="2.1"))
    why = f"made with Triton 2.1, this is {tuning_table.TRITON}"
    with caplog.at_level(logging.INFO, "fusedvit"):
        assert (
            tuning_table.table_for(H200) == tuning_table.table_for(H200) == Table({}, (f"{whose} tuning table: {why}",))
        )
    (record,) = caplog.records
    assert why in record.getMessage() and record.levelno == level
    assert choices(QWEN3_VL_8B, BF16, H200, [784])[-1] == f"  {whose} tuning table: {why}; heuristics used instead"


def test_a_malformed_table_of_ours_is_warned_of(folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    write(folders[1], {"passport": {"gpu": "NVIDIA H200", "triton": 3.6}})
    with caplog.at_level(logging.INFO, "fusedvit"):
        assert tuning_table.table_for(H200) == Table()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "triton must be str, got float" in record.getMessage()


@pytest.mark.parametrize("whose", ["own", "shipped"])
def test_changed_sources_make_one_form_stale(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    made = document(entry(), entry(HEADS, ATTENTION))
    made["passport"]["sources"]["linear/triton"] = "0" * 16
    write(folders[whose == "shipped"], made)
    table = tuning_table.table_for(H200)
    assert table.find(KEY, H200, BF16) is None and table.find(HEADS, H200, BF16) == ATTENTION
    assert table.stale == (f"{whose} tuning table: the sources of linear/triton have changed since",)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the sources of linear/triton have changed since" in record.getMessage()


def test_only_what_is_stale_is_left_out(folders: tuple[Path, Path]) -> None:
    """A user's own table answers beside a shipped one for another Triton."""
    write(folders[0], document(entry()))
    write(folders[1], document(entry(HEADS, ATTENTION), triton="2.1"))
    table = tuning_table.table_for(H200)
    assert table.entries == {KEY: CONFIG} and len(table.stale) == 1


def test_entries_of_forms_unknown_here_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, document(entry(), entry(HEADS, backend="of tomorrow", config={"x": 1})))
    assert tuning_table.read(path, "NVIDIA H200").entries == {KEY: CONFIG}


@pytest.mark.parametrize(
    "config, target",
    [
        (LinearConfig(48, 64, 64, 4, 3), H200),
        (LinearConfig(128, 64, 64, 3, 3), H200),
        (LinearConfig(256, 256, 128, 8, 4), H200),
        (CONFIG, Target(80, 108, 163 * 1024)),
    ],
    ids=["no power of two", "three warps", "too much shared memory", "no copy engine"],
)
def test_what_cannot_run_is_not_found(config: LinearConfig, target: Target) -> None:
    assert Table({KEY: CONFIG}).find(KEY, H200, BF16) == CONFIG
    assert Table({KEY: config}).find(KEY, target, BF16) is None


def test_no_gpu_no_table() -> None:
    assert tuning_table.table_for(Target()) == Table()
    assert tuning_table.file_name("NVIDIA H200") == "nvidia-h200.json"


def test_fingerprints_are_blind_to_words_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(source: str) -> str:
        monkeypatch.setattr(tuning_table.inspect, "getsource", lambda module: source)
        tuning_table.fingerprint.cache_clear()
        return tuning_table.fingerprint(backends.BACKENDS[0])

    plain = of('"""Says."""\ndef f(x):\n    """Does."""\n    return x + 1\n')
    assert of('"""Says more."""\n\n\ndef f(x):  # a comment\n    """Does."""\n    return (x + 1)\n') == plain
    assert of("def f(x):\n    return x + 2\n") != plain
    tuning_table.fingerprint.cache_clear()


def test_tables_that_ship_are_well_formed() -> None:
    """Read as on their GPU; another Triton, or sources changed since, make one stale, and no error."""
    for path in tuning_table.SHIPPED.glob("*.json"):
        gpu = json.loads(path.read_text(encoding="utf-8"))["passport"]["gpu"]
        assert path.name == tuning_table.file_name(gpu)
        table = tuning_table.read(path, gpu)
        assert table.entries or table.stale, f"{path} says nothing"


def test_a_shipped_table_is_looked_up_by_the_budget_alone(folders: tuple[Path, Path]) -> None:
    """Between two budgets that it knows nothing is answered: heuristics choose there."""
    write(folders[1], document(entry(), entry(replace(KEY, rows=2048))))
    table = tuning_table.table_for(H200)
    found = {rows: table.find(replace(KEY, rows=rows), H200, BF16) for rows in (1024, 1280, 2048)}
    assert found == {1024: CONFIG, 1280: None, 2048: CONFIG}


def test_shipped_tables_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Triton, the PyTorch and the sources that they were made with: each entry can be, and stands once."""
    shipped = sorted(tuning_table.SHIPPED.glob("*.json"))
    assert [path.name for path in shipped] == [tuning_table.file_name("NVIDIA H200")]
    for path in shipped:
        found = json.loads(path.read_text(encoding="utf-8"))
        passport = found["passport"]
        monkeypatch.setattr(tuning_table, "TRITON", passport["triton"])
        monkeypatch.setattr(tuning_table, "TORCH", tuning_table.minor(passport["torch"]))
        monkeypatch.setattr(
            tuning_table, "fingerprint", lambda backend, p=passport: p["sources"].get(f"{backend.op}/{backend.name}")
        )
        table = tuning_table.read(path, passport["gpu"])
        assert not table.stale and len(table.entries) == len(found["entries"]) > 500
        for config in table.entries.values():
            if isinstance(config, HopperGemmConfig):
                assert wrong_hopper_gemm(config, H200, BF16) == "", config
