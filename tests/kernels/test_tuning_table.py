"""Tuning tables: read strictly, the user's over the shipped one, left out with one warning where they do not hold."""

import contextlib
import errno
import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.backends import Key
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.tile_configs import AttentionConfig, LinearConfig, Target
from fusedvit.kernels.tuning_table import Table, TableError
from fusedvit.model.plan import known_plan
from fusedvit.stats import choices
from tests.support.specs import QWEN3_VL_8B

BF16 = torch.bfloat16
H200 = Target(name="NVIDIA H200")
KEY = Key("linear", "norm+rope", 3456, 1152, 1024, "bfloat16")
HEADS = Key("attention", "", 16, 72, 1024, "bfloat16")
CONFIG, ATTENTION = LinearConfig(128, 64, 64, 4, 3), AttentionConfig(128, 64, 8, 2)


def entry(key: Key = KEY, chosen: Any = CONFIG, **changes: Any) -> dict[str, Any]:
    return {**asdict(key), "backend": "triton", "config": asdict(chosen), "us": 12.5, **changes}


def document(*entries: dict[str, Any], **passport: Any) -> dict[str, Any]:
    return {"passport": tuning_table.passport("NVIDIA H200", "0.0") | passport, "entries": list(entries)}


def other_versions(**changed: int) -> dict[str, int]:
    """Versions of all backends, some other than today's ("linear_triton")."""
    today = {backend.id: backend.version for backend in backends.BACKENDS}
    return today | {name.replace("_", "/", 1): version for name, version in changed.items()}


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvidia-h200.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(the user's folder, the shipped one), both empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "shipped").mkdir()
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
    "deeper than Python reads": ("[" * 100_000, "not JSON"),
    "a list": ([], "expected 'passport'"),
    "no passport": ({"entries": []}, "expected 'passport'"),
    "no versions": ({"passport": {"gpu": "NVIDIA H200"}, "entries": []}, "passport: expected 'backends'"),
    "another GPU": (document(gpu="NVIDIA A100"), "measured on 'NVIDIA A100', this is 'NVIDIA H200'"),
    "entries no list": ({**document(), "entries": {}}, "entries must be list, got dict"),
    "no backend": (document({**asdict(KEY), "config": {}}), "entry 0: expected 'backend'"),
    "rows as text": (document(entry(rows="1024")), "rows must be int, got str"),
    "rows as bool": (document(entry(rows=True)), "rows must be int, got bool"),
    "odd dtype": (document(entry(dtype="int8")), "dtype must be one of"),
    "unknown field": (document(entry(config={**asdict(CONFIG), "block_z": 3})), "LinearConfig has no block_z"),
    "missing field": (document(entry(config={"block_m": 64})), "entry 0: LinearConfig"),
    "field of another type": (document(entry(config={**asdict(CONFIG), "block_m": 64.0})), "block_m must be int"),
    "flag as int": (document(entry(config={**asdict(CONFIG), "copy_engine": 1})), "copy_engine must be bool, got int"),
}


@pytest.mark.parametrize("content, said", BAD.values(), ids=BAD)
def test_a_malformed_table_is_refused_and_warned_of_once(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, content: Any, said: str
) -> None:
    path = write(folders[0], content)
    with pytest.raises(TableError) as error:
        tuning_table.read(path, "NVIDIA H200")
    assert said in str(error.value) and str(path) in str(error.value)
    with caplog.at_level(logging.WARNING, "fusedvit"):
        assert tuning_table.table_for(H200) == tuning_table.table_for(H200) == Table()
    (record,) = caplog.records
    assert said in record.getMessage() and "heuristics used instead" in record.getMessage()


def test_a_table_that_the_system_cannot_read_now_is_read_later(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(folders[0], document(entry()))
    with monkeypatch.context() as here, caplog.at_level(logging.WARNING, "fusedvit"):
        here.setattr(tuning_table, "read", mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert tuning_table.table_for(H200) == Table()
    assert "cannot be read for now, heuristics used instead: [Errno 24]" in caplog.text
    assert tuning_table.table_for(H200).entries[KEY] == CONFIG


def test_a_folder_that_is_forbidden_has_no_table(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "stat", mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    assert tuning_table.table_for(H200) == Table()


def test_an_archive_that_holds_the_tables_is_told_of(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A zipapp runs from a file, in which they are not read."""
    write(folders[0], document(entry()))
    monkeypatch.setattr(tuning_table, "SHIPPED", Path("app.pyz") / "tuned")
    for _ in range(2):
        assert tuning_table.table_for(H200).entries == {KEY: CONFIG}
    said = [record.getMessage() for record in caplog.records if record.name == "fusedvit"]
    assert said == ["fusedvit: heuristics used instead of the shipped tuning tables: app.pyz/tuned is not a folder"]


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


def test_plans_are_kept_until_a_table_is_read_again(folders: tuple[Path, Path]) -> None:
    before = known_plan(QWEN3_VL_8B, 1024, BF16, H200)
    mine = replace(CONFIG, block_m=64)
    write(folders[0], document(entry(chosen=mine)))
    assert known_plan(QWEN3_VL_8B, 1024, BF16, H200) is before and before.qkv != mine
    tuning_table.forget()
    assert known_plan(QWEN3_VL_8B, 1024, BF16, H200).qkv == mine


@pytest.mark.parametrize("whose, level", [("own", logging.WARNING), ("shipped", logging.INFO)])
def test_entries_of_another_version_of_their_backend_are_left_out(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, whose: str, level: int
) -> None:
    """The rest holds. Only the user's own table is worth a warning: it is the user who can measure it anew."""
    made = document(entry(), entry(HEADS, ATTENTION), backends=other_versions(linear_triton=0))
    write(folders[whose == "shipped"], made)
    why = f"{whose} tuning table: version 0 of linear/triton, this is 1"
    with caplog.at_level(logging.INFO, "fusedvit"):
        assert tuning_table.table_for(H200) == tuning_table.table_for(H200) == Table({HEADS: ATTENTION}, (why,))
    (record,) = caplog.records
    assert "version 0 of linear/triton, this is 1" in record.getMessage() and record.levelno == level
    assert choices(QWEN3_VL_8B, BF16, H200, [784])[-1] == f"  {why}; heuristics used instead"


def test_configurations_of_another_version_are_not_parsed(tmp_path: Path) -> None:
    """Their fields may have been others."""
    versions = other_versions(linear_triton=2)
    path = write(tmp_path, document(entry(config={"of": "tomorrow"}), entry(HEADS, ATTENTION), backends=versions))
    table = tuning_table.read(path, "NVIDIA H200")
    assert table.entries == {HEADS: ATTENTION}
    assert table.stale == ("version 2 of linear/triton, this is 1",)


def test_a_backend_that_the_passport_lacks_is_of_another_version(tmp_path: Path) -> None:
    path = write(tmp_path, document(entry(), backends={}))
    assert tuning_table.read(path, "NVIDIA H200") == Table({}, ("version None of linear/triton, this is 1",))


@pytest.mark.parametrize("version", ["triton_version", "torch", "fusedvit"])
def test_other_versions_void_nothing(tmp_path: Path, version: str) -> None:
    path = write(tmp_path, document(entry(), **{version: "0.1"}))
    assert tuning_table.read(path, "NVIDIA H200") == Table({KEY: CONFIG})


def test_only_what_is_stale_is_left_out(folders: tuple[Path, Path]) -> None:
    """A shipped entry serves where the user's own is of another version."""
    mine = LinearConfig(64, 64, 128, 4, 3)
    write(folders[0], document(entry(chosen=mine), entry(HEADS, ATTENTION), backends=other_versions(linear_triton=0)))
    write(folders[1], document(entry()))
    table = tuning_table.table_for(H200)
    assert table.entries == {KEY: CONFIG, HEADS: ATTENTION} and len(table.stale) == 1


def test_entries_of_unknown_backends_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path, document(entry(), entry(HEADS, backend="of tomorrow", config={"x": 1})))
    assert tuning_table.read(path, "NVIDIA H200") == Table({KEY: CONFIG})


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


def test_a_shipped_table_is_looked_up_by_the_budget_alone(folders: tuple[Path, Path]) -> None:
    """Between two budgets that it knows nothing is answered: heuristics choose there."""
    write(folders[1], document(entry(), entry(replace(KEY, rows=2048))))
    table = tuning_table.table_for(H200)
    found = {rows: table.find(replace(KEY, rows=rows), H200, BF16) for rows in (1024, 1280, 2048)}
    assert found == {1024: CONFIG, 1280: None, 2048: CONFIG}


def test_shipped_tables_hold(on_hopper: None) -> None:
    """Every entry is read, stands once, and can run on the GPU and the Triton that it was measured with."""
    shipped = sorted(tuning_table.SHIPPED.glob("*.json"))
    assert [path.name for path in shipped] == [tuning_table.file_name("NVIDIA H100 80GB HBM3")]
    for path in shipped:
        found = json.loads(path.read_text(encoding="utf-8"))
        table = tuning_table.read(path, found["passport"]["gpu"])
        assert not table.stale and len(table.entries) == len(found["entries"]) > 20
        refused = [key for key in table.entries if table.find(key, H200, tuning_table.DTYPES[key.dtype]) is None]
        if gluon_compat.NEEDS_MORE_REGISTERS:
            assert len(refused) < 0.1 * len(table.entries), "what a newer Triton compiles badly is a few entries"
        else:
            assert not refused


def test_a_shipped_table_is_one_entry_a_line() -> None:
    for path in tuning_table.SHIPPED.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        lines = ",\n".join("  " + json.dumps(entry) for entry in json.loads(text)["entries"])
        assert f' "entries": [\n{lines}\n ]\n}}\n' in text


def written(path: Path) -> list[tuple[int, float]]:
    """(rows, us) of a table's entries."""
    return [(e["rows"], e["us"]) for e in json.loads(path.read_text(encoding="utf-8"))["entries"]]


def timed(rows: int, us: float) -> dict[str, Any]:
    return tuning_table.entry_of(replace(KEY, rows=rows), CONFIG, us=us)


def test_a_written_table_is_read_back(tmp_path: Path) -> None:
    path, passport = tmp_path / "new" / "nvidia-h200.json", tuning_table.passport("NVIDIA H200", "0.2.0")
    tuning_table.write(path, passport, [timed(64, 1.0), tuning_table.entry_of(HEADS, ATTENTION, us=2.0)])
    assert tuning_table.read(path, "NVIDIA H200") == Table({replace(KEY, rows=64): CONFIG, HEADS: ATTENTION})
    assert json.loads(path.read_text())["passport"] == passport and passport["fusedvit"] == "0.2.0"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing unfinished is left"


def test_writing_keeps_what_was_not_decided_anew(tmp_path: Path) -> None:
    path, passport = tmp_path / "t.json", tuning_table.passport("CPU", "0")
    tuning_table.write(path, passport, [timed(64, 1.0), timed(128, 2.0)])
    tuning_table.write(path, passport, [timed(128, 3.0)])
    assert written(path) == [(64, 1.0), (128, 3.0)]
    tuning_table.write(path, passport, [], [replace(KEY, rows=64)])
    assert written(path) == [(128, 3.0)], "the heuristic's choice is as fast now"


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EIO])
def test_a_table_that_is_mounted_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It is written where it is; after other errors the older one stays."""
    path, passport = tmp_path / "a.json", tuning_table.passport("NVIDIA H200", "0")
    tuning_table.write(path, passport, [timed(64, 1.0)])

    def refused(self: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(OSError) if number == errno.EIO else contextlib.nullcontext():
        tuning_table.write(path, passport, [timed(128, 2.0)])
    assert len(written(path)) == (1 if number == errno.EIO else 2)
    assert (tmp_path / "a.json.new").exists() == (number == errno.EIO)


def test_writing_drops_entries_of_other_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    passport = tuning_table.passport("NVIDIA H200", "0")
    old = [timed(64, 1.0), tuning_table.entry_of(HEADS, ATTENTION, us=2.0), timed(256, 3.0) | {"backend": "gone"}]
    path = write(tmp_path, document(*old, backends=other_versions(linear_triton=0)))
    tuning_table.write(path, passport, [timed(128, 4.0)])
    assert written(path) == [(1024, 2.0), (128, 4.0)] and not caplog.records
    path = write(tmp_path, {"passport": {"gpu": "NVIDIA H200", "sources": {}}, "entries": old})
    tuning_table.write(path, passport, [timed(128, 4.0)])
    assert written(path) == [(128, 4.0)] and "replaced" in caplog.text, "a table of another format"


def test_a_user_without_a_home(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A number without an entry among the users, and without HOME: the shipped tables are read all the same."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    write(folders[1], document(entry()))
    assert tuning_table.user_folder() == Path("~/.cache/fusedvit/tuned")
    assert tuning_table.table_for(H200).entries
