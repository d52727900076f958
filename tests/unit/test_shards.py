"""Shards on the disk: whole or absent, whatever fails and whoever is killed."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pyarrow")
import pyarrow.parquet  # noqa: E402

from fusedvit.corpus import shards  # noqa: E402
from fusedvit.corpus.shards import Embedded  # noqa: E402
from fusedvit.errors import InputError  # noqa: E402

JOB = {"model": "m", "shard_size": 3}
# Every step of a commit that may fail: the module or class, its function.
STEPS: list[tuple[Any, str]] = [
    (shards, "_new_folder"),
    (shards, "save_file"),
    (pyarrow.parquet, "write_table"),
    (os, "open"),
    (os, "fsync"),
    (Path, "rename"),
]
FOUND = [
    Embedded("a", torch.arange(6.0).view(2, 3), (1, 2, 4)),
    Embedded("b", None, error="b: does not decode"),
    Embedded("c", torch.full((1, 3), 7.0), (1, 2, 2)),
]


def commit(out: Path, number: int = 0, found: list[Embedded] = FOUND) -> bool:
    return shards.commit(out, number, found, 3, torch.float32)


def assert_whole(out: Path, numbers: set[int]) -> None:
    """Exactly these shards are there, each reads, and nothing unfinished is left."""
    assert shards.committed(out) == numbers
    for number in numbers:
        found = shards.read(out, number)
        assert [(e.id, e.grid_thw, e.error) for e in found] == [(e.id, e.grid_thw, e.error) for e in FOUND]
        assert [e.rows is None for e in found] == [e.rows is None for e in FOUND]
        assert all(torch.equal(e.rows, w.rows) for e, w in zip(found, FOUND, strict=True) if e.rows is not None)
    assert {path.name for path in out.iterdir()} == {shards.JOB, *(f"shard-{n:05d}" for n in numbers)}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    shards.start(tmp_path / "out", JOB)
    assert commit(tmp_path / "out", 0) and commit(tmp_path / "out", 17)
    assert_whole(tmp_path / "out", {0, 17})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    shards.start(tmp_path / "out", JOB)
    shards.commit(tmp_path / "out", 0, FOUND, 3, dtype)
    rows = shards.read(tmp_path / "out", 0)[0].rows
    assert rows is not None and rows.dtype == dtype


def test_a_shard_of_errors_alone(tmp_path: Path) -> None:
    shards.start(tmp_path / "out", JOB)
    commit(tmp_path / "out", 0, [FOUND[1]])
    assert [e.error for e in shards.read(tmp_path / "out", 0)] == [FOUND[1].error]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_who_may_read_is_the_umasks_to_say(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        shards.start(tmp_path / "out", JOB)
        commit(tmp_path / "out")
    finally:
        os.umask(before)
    for path in (tmp_path / "out").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_a_file_system_that_changes_no_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refused)
    shards.start(tmp_path / "out", JOB)
    assert commit(tmp_path / "out")
    assert_whole(tmp_path / "out", {0})


def test_a_start_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between writing the job and its rename."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            shards.start(tmp_path / "out", JOB)
    shards.start(tmp_path / "out", JOB)
    assert_whole(tmp_path / "out", set())


def test_the_second_of_two_writers_changes_nothing(tmp_path: Path) -> None:
    shards.start(tmp_path / "out", JOB)
    assert commit(tmp_path / "out")
    assert not commit(tmp_path / "out", 0, FOUND[:1])
    assert_whole(tmp_path / "out", {0})


def test_writers_that_meet_at_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards.start(tmp_path / "out", JOB)
    rename = Path.rename

    def slower(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        commit(tmp_path / "out")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", slower)
    assert not commit(tmp_path / "out", 0, FOUND[:1])
    assert_whole(tmp_path / "out", {0})


@pytest.mark.parametrize("again", [1, 2])
@pytest.mark.parametrize("step", ["_new_folder", "save_file", "write_table", "rename"])
def test_a_start_while_another_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, again: int) -> None:
    """Before each step of the writing; also where the folder was not yet locked, and is removed."""
    out, left = tmp_path / "out", again
    shards.start(out, JOB)
    where = dict((name, where) for where, name in STEPS)[step]
    real = getattr(where, step)

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        found = real(*args, **kwargs) if step == "_new_folder" else None
        if left:
            left -= 1
            shards.start(out, JOB)
        return found if step == "_new_folder" else real(*args, **kwargs)

    monkeypatch.setattr(where, step, disturbed)
    assert commit(out)
    monkeypatch.undo()
    assert left == (0 if step == "_new_folder" else again - 1)  # what is locked is written once
    assert_whole(out, {0})


@pytest.mark.parametrize("half", [[], [shards.INDEX], [shards.ROWS]])
def test_two_writers_replace_half_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: list[str]) -> None:
    """The second commits between the first one's removal of the half and its rename."""
    out, real, removed = tmp_path / "out", shutil.rmtree, []
    shards.start(out, JOB)
    for name in half:
        (out / "shard-00000").mkdir(exist_ok=True)
        (out / "shard-00000" / name).write_text("half")

    def slower(path: Path, *args: Any, **kwargs: Any) -> None:
        real(path, *args, **kwargs)
        if path.name == "shard-00000" and not removed:
            removed.append(path)
            assert commit(out)

    monkeypatch.setattr(shutil, "rmtree", slower)
    assert commit(out) == (not half) and len(removed) == len(half)
    assert_whole(out, {0})


@pytest.mark.parametrize("step", ["save_file", "write_table"])
def test_a_folder_that_is_removed_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """By whoever does not ask for locks, whatever is raised then; not without end."""
    out = tmp_path / "out"
    shards.start(out, JOB)
    where = dict((name, where) for where, name in STEPS)[step]
    real, left = getattr(where, step), 2

    def removing(*args: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            for path in out.glob(".unfinished-*"):
                shutil.rmtree(path)
        return real(*args)

    monkeypatch.setattr(where, step, removing)
    assert commit(out) and left == 0
    left = 100
    with pytest.raises(InputError, match="shard 1 cannot be written"):
        commit(out, 1)
    assert_whole(out, {0})


def test_starts_at_once(tmp_path: Path) -> None:
    """Of one job, in processes; also of two jobs, of which one begins and the other is refused."""
    context = multiprocessing.get_context("fork")
    for round_ in range(30):
        out, barrier, said = tmp_path / str(round_), context.Barrier(3), context.SimpleQueue()
        jobs = [JOB, JOB, JOB if round_ % 2 else JOB | {"model": "other"}]

        def begin(job: dict[str, Any], out: Path = out, barrier: Any = barrier, said: Any = said) -> None:
            barrier.wait()
            try:
                shards.start(out, job)
                said.put("")
            except InputError as error:
                said.put(str(error))

        processes = [context.Process(target=begin, args=(job,)) for job in jobs]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = [said.get() for _ in jobs]
        assert found.count("") == 3 if round_ % 2 else found.count("") in (1, 2), found
        assert all("model was" in line for line in found if line)
        assert [path.name for path in out.iterdir()] == [shards.JOB]


def test_what_is_left_by_the_killed_alone_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shards.start(out, JOB)
    (out / ".unfinished-folder").mkdir()
    (out / ".unfinished-file").touch()
    held = os.open(out / ".unfinished-folder", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    shards.start(out, JOB)
    assert {path.name for path in out.iterdir()} == {shards.JOB, ".unfinished-folder"}
    os.close(held)
    shards.start(out, JOB)
    assert_whole(out, set())


def test_file_systems_without_locks_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unfinished is removed when it is old."""

    def none(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(os, "link", none)
    out = tmp_path / "out"
    shards.start(out, JOB)
    for name in ("new", "old"):
        (out / f".unfinished-{name}").mkdir()
    os.utime(out / ".unfinished-old", (1, 1))
    shards.start(out, JOB)
    assert {path.name for path in out.iterdir()} == {shards.JOB, ".unfinished-new"}
    with shards.in_use(out):
        assert commit(out)
    shards.abandon(out, JOB)
    assert shards.holds_job(out)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("numbers", [set(), {0}, {3}])
def test_a_job_that_is_taken_back(tmp_path: Path, used: bool, numbers: set[int]) -> None:
    """Only where nobody is at work on it, and nothing is committed."""
    out = tmp_path / "out"
    shards.start(out, JOB)
    for number in numbers:
        commit(out, number)
    with shards.in_use(out) if used else contextlib.nullcontext():
        shards.abandon(out, JOB | {"model": "another"})
        assert shards.holds_job(out)
        shards.abandon(out, JOB)
    assert shards.holds_job(out) == (used or bool(numbers))
    if not shards.holds_job(out):
        with pytest.raises(InputError, match="job.json is gone, start again"), shards.in_use(out):
            pass


def test_folders_that_are_no_shard(tmp_path: Path) -> None:
    """An empty one, or one with half of a shard, is replaced; others are named."""
    out = tmp_path / "out"
    shards.start(out, JOB)
    for name in ("shard-00000", "shard-00001", "shard-00004", "shard-00005", "shard-x"):
        (out / name).mkdir()
    (out / "shard-00001" / shards.INDEX).write_text("half")
    (out / "shard-00004" / shards.ROWS).write_text("half")
    (out / "shard-00005" / "notes.txt").write_text("somebody's")
    (out / "shard-00002").write_text("a file")
    (out / "shard-00006").symlink_to("nowhere")
    (commit(out, 3), (out / "shard-00003").rename(out / "shard-000003"))
    assert shards.committed(out) == set()
    assert commit(out, 0) and commit(out, 1) and commit(out, 4) and shards.committed(out) == {0, 1, 4}
    for number in (2, 5, 6):
        with pytest.raises(InputError, match=f"shard {number} cannot be written: .*shard-0000{number} is in the way"):
            commit(out, number)
    assert (out / "shard-00005" / "notes.txt").read_text() == "somebody's" and not list(out.glob(".*"))


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("where", "step"), STEPS, ids=[step for _, step in STEPS])
def test_a_fault_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, step: str, nth: int) -> None:
    """The error is named, what was committed stays whole, and the shard is written when it is tried again."""
    out = tmp_path / "out"
    shards.start(out, JOB)
    commit(out, 0)
    real, calls = getattr(where, step), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(where, step, failing)
        if calls < nth:
            try:
                commit(out, 1)
            except InputError as error:
                assert "shard 1 cannot be written" in str(error) and "No space left" in str(error)
                renamed = (step, nth) in (("open", 5), ("fsync", 4))  # the folder's own list, after the rename
                assert_whole(out, {0, 1} if renamed else {0})
    commit(out, 1)
    assert_whole(out, {0, 1})


def test_killed_writers_leave_no_shard(tmp_path: Path) -> None:
    """A child is killed at a random moment of its writing; the next start removes what it left."""
    out = tmp_path / "out"
    shards.start(out, JOB)
    for number in range(10):
        child = os.fork()
        if not child:
            _die_while_writing(out, number)
        os.waitpid(child, 0)
        assert shards.committed(out) <= set(range(number + 1))
    shards.start(out, JOB)
    for number in set(range(10)) - shards.committed(out):
        commit(out, number)
    assert_whole(out, set(range(10)))


def _die_while_writing(out: Path, number: int) -> None:
    """`kill -9` of this process before, in or after one of the steps, by `number`."""
    left = number

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), 9)
            return function(*args, **kwargs)

        return call

    for where, step in STEPS:
        setattr(where, step, dying(getattr(where, step)))
    commit(out, number)
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize(
    "prepare, expected",
    [
        (lambda out: (out.mkdir(), (out / "other").write_text("x")), "not empty"),
        (lambda out: out.write_text("a file"), "out: cannot be used as output: a folder expected, got a file"),
        (lambda out: out.symlink_to("/dev/null"), "out: cannot be used as output: a folder expected, got a file"),
        (lambda out: (out.mkdir(), (out / shards.JOB).write_text("{")), "cannot be used"),
        (lambda out: (out.mkdir(), (out / shards.JOB).write_text("[" * 100_000)), "cannot be used"),
        (lambda out: (out.mkdir(), (out / shards.JOB).write_text("[]")), "no job of"),
        (lambda out: shards.start(out, JOB | {"shard_size": 4}), "shard_size was 4 and is 3"),
        (lambda out: shards.start(out, JOB | {"weights": "1a"}), "checkpoint's weights .* got others .digest 1a, now"),
        (lambda out: shards.start(out, JOB | {"version": 1}), "another version of fusedvit: job.json of version"),
    ],
)
def test_folders_that_are_no_output(tmp_path: Path, prepare: Callable[[Path], object], expected: str) -> None:
    prepare(tmp_path / "out")
    with pytest.raises(InputError, match=expected):
        shards.start(tmp_path / "out", JOB)


FILES = {"files_digest": "1a", "given": ["/a/l.txt"]}


def test_the_same_files_by_other_names(tmp_path: Path) -> None:
    for job in (JOB | FILES, JOB | FILES | {"given": []}):
        shards.start(tmp_path / "out", job)


def test_other_files_of_the_same_names_are_refused(tmp_path: Path) -> None:
    """Where both differ, what can be read comes first."""
    shards.start(tmp_path / "out", JOB | FILES)
    other = JOB | {"files_digest": "2b", "given": ["/b/l.txt"]}
    said = r"other files.*\(begun with \['/a/l.txt'\], now \['/b/l.txt'\]\); put them back to go on"
    with pytest.raises(InputError, match=said):
        shards.start(tmp_path / "out", other)
    damaged = json.dumps(JOB | FILES | {"given": 3})
    (tmp_path / "out" / shards.JOB).write_text(damaged)
    with pytest.raises(InputError, match="begun with 3, now"):
        shards.start(tmp_path / "out", other)
    with pytest.raises(InputError, match="shard_size was 3 and is 4"):
        shards.start(tmp_path / "out", other | {"shard_size": 4})


@pytest.mark.parametrize("most, expected", [(5, [(0, "b"), (1, "b"), (2, "b")]), (2, [(0, "b"), (1, "b")]), (0, [])])
def test_inputs_that_are_errors(tmp_path: Path, most: int, expected: list[tuple[int, str]]) -> None:
    shards.start(tmp_path / "out", JOB)
    for number in range(4):
        commit(tmp_path / "out", number)
    found = shards.failed(tmp_path / "out", range(3), most)
    assert [(each.shard, each.id) for each in found] == expected
    assert all(each.error == "b: does not decode" for each in found)


@pytest.mark.parametrize("file", [shards.INDEX, shards.ROWS])
@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:20])])
def test_a_damaged_shard_is_named(tmp_path: Path, file: str, damage: Callable[[Path], object]) -> None:
    shards.start(tmp_path / "out", JOB)
    commit(tmp_path / "out")
    shards.check_committed(tmp_path / "out", 0, "abc")
    damage(tmp_path / "out" / "shard-00000" / file)
    with pytest.raises(InputError, match="shard-00000: does not read"):
        shards.read(tmp_path / "out", 0)
    with pytest.raises(InputError, match="shard-00000: does not read: .*; remove it"):
        shards.check_committed(tmp_path / "out", 0, "abc")


def test_a_shard_of_something_else_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shards.start(out, JOB)
    (commit(out, 0), commit(out, 1, FOUND[1:]))
    with pytest.raises(InputError, match="shard-00000: 4 inputs expected, got 3"):
        shards.check_committed(out, 0, "abcd")
    with pytest.raises(InputError, match="shard-00000: input 'x' expected, got 'b'; remove it"):
        shards.check_committed(out, 0, "axc")
    (out / "shard-00001" / shards.ROWS).replace(out / "shard-00000" / shards.ROWS)
    with pytest.raises(InputError, match="shard-00000: 3 rows expected, got 1"):
        shards.check_committed(out, 0, "abc")
