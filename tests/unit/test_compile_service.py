"""The program that compiles kernels, for a GPU that is not there: its keys, its end, full disks, two at a time."""

import errno
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import spawn
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fusedvit.runtime import compile_service, compile_worker
from fusedvit.runtime.compile_service import CompileService, Request
from fusedvit.runtime.compile_worker import Child, Waiting, Worker
from tests.support.fake_compiler import FakeJob
from tests.support.waiting import alive, children, until

ROOT = Path(__file__).resolve().parents[2]
FULL = """
import errno, sys
if "fusedvit.runtime.compile_program" in sys.orig_argv:
    from triton.runtime.cache import FileCacheManager
    put = FileCacheManager.put
    def full(self, *given, **named):
        if "fusedvit-" not in self.cache_dir:
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(self, *given, **named)
    FileCacheManager.put = full
"""
BROKEN = """
import sys
if "fusedvit.runtime.compile_program" in sys.orig_argv:
    sys.exit(3)
"""

MORE_THAN_NAMES = """
import sys
class Refuses:
    def find_spec(self, name, *_):
        if name == "fusedvit.runtime.compile_worker":
            raise TypeError("a name of PyTorch will not do")
if "fusedvit.runtime.compile_program" in sys.orig_argv:
    sys.meta_path.insert(0, Refuses())
"""
COUNTING = """
import os, sys
if "fusedvit.runtime.compile_program" in sys.orig_argv:
    with open(os.environ["STARTS"], "a") as file:
        file.write("one more\\n")
"""
NO_ROOM_TO_FORK = """
import errno, os, sys
if "fusedvit.runtime.compile_program" in sys.orig_argv:
    def full():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    os.fork = full
"""
PRINTING = """
import sys
if "fusedvit.runtime.compile_program" in sys.orig_argv:
    print("an extension of PyTorch says hello", flush=True)
"""


def environment(cache: Path | str, site: Path | None = None) -> dict[str, str]:
    """Without the interpreter; `site` holds a module that every process runs as it starts."""
    folders = [str(folder) for folder in (site, ROOT, os.environ.get("PYTHONPATH")) if folder]
    changed = {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(folders), "TRITON_INTERPRET": "0"}
    return os.environ | changed


def start(env: dict[str, str], *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.support.compiling", *words]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=env, cwd=ROOT, text=True, **pipes)


def result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found | {"said": err}


def site(folder: Path, text: str) -> Path:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(text, encoding="utf-8")
    return folder / "site"


def test_kernels_are_in_the_cache_under_the_keys_of_the_launches(tmp_path: Path) -> None:
    """By two processes at once, which share the cache."""
    env = environment(tmp_path / "cache")
    both = [start(env, "together"), start(env, "together")]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "looked\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None  # `communicate` would flush it
    for found in map(result, both):
        assert found["sent"] == found["done"] == 4 and found["failed"] == [] and found["broken"] == ""
        assert found["cached"] and found["left"] == 0 and not found["kept"]
    again = result(start(env))
    assert again["sent"] == 0 and again["starts"] == 0, "where everything is there, no program is started"
    assert not list((tmp_path / "cache").rglob("tmp.pid*"))


def test_settings_that_change(tmp_path: Path) -> None:
    """PyTorch's Inductor sets TRITON_CACHE_DIR and TRITON_PTXAS_PATH when it first compiles, vLLM the former."""
    ptxas = tmp_path / "ptxas"
    ptxas.write_text("#!/bin/sh\necho Cuda compilation tools, release 99.9\n")
    ptxas.chmod(0o755)
    env = environment(tmp_path / "cache") | {"OTHER_PTXAS": str(ptxas)}
    found = result(start(env, "move"))
    assert found["broken"] == "" and found["failed"] == [] and found["left"] == 0 and not found["kept"]
    assert found["done"] == 4, "what was compiled into the first folder is compiled into the second one"


@pytest.mark.parametrize("change", ["debug", "damage"])
def test_what_a_notebook_or_a_cleaner_changes(change: str, tmp_path: Path) -> None:
    found = result(start(environment(tmp_path / "cache"), change))
    assert found["broken"] == "" and found["failed"] == [] and found["left"] == 0
    assert "fusedvit: " not in found["said"]


def test_other_settings_are_a_new_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = mock.Mock()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CompileService, "_start", started)
    service, job = CompileService(), FakeJob("a kernel")
    request = Request(90, "", {"digest": job}, 1.0, urgent=False)  # type: ignore[dict-item]
    service.compile(request)
    service.failed["another"] = "its compiler does not run"
    service.give_up("the compiling process ended with status 1")
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    service.compile(request)
    assert not service.broken and not service.failed and service.waits_for(["digest"])
    assert started.call_count == 2


def test_answers_of_a_program_that_was_ended() -> None:
    """They are of settings of before."""
    service, ended, answers = CompileService(), mock.Mock(), [{"private": "/nowhere"}, {"failed": "d", "error": "no"}]
    ended.stdout = io.BytesIO("".join(json.dumps(answer) + "\n" for answer in answers).encode())
    with mock.patch.object(service, "_take_private", side_effect=AssertionError("it moves to a folder")):
        service._listen(ended, mock.Mock())
    assert service.broken == "" and ended.wait.called


def test_a_cache_that_takes_no_files_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever program finds it."""
    monkeypatch.setattr(compile_service.triton.knobs.cache, "manager_class", None)
    warned = mock.Mock()
    monkeypatch.setattr(compile_service.logger, "warning", warned)
    service = CompileService()
    for cache in "/one", "/one", "/another":
        monkeypatch.setenv("TRITON_CACHE_DIR", cache)
        service._hear({"private": "/kernels"})
    assert [call.args[1] for call in warned.call_args_list] == ["/one", "/another"]


def test_a_folder_for_temporary_files_that_was_removed(tmp_path: Path) -> None:
    """As systems do that clear /tmp of what is old."""
    service = CompileService()
    service._scratch = str(tmp_path / "removed")
    with service.changed:
        service._start()
    assert service.broken == "" and os.path.isdir(service._scratch)
    service.stop()


def test_what_cannot_be_written_is_tried_again_before_another_folder(tmp_path: Path) -> None:
    """Somebody may have cleared the cache just then, or put a file in its place."""
    worker, job = Worker(os.getpid(), tmp_path, io.StringIO()), FakeJob("a kernel")
    kernel = Waiting(job, 90, (1.0, 0.0), False)  # type: ignore[arg-type]
    for moved in False, True:
        reader, writer = os.pipe()
        os.write(writer, json.dumps({"error": "NotADirectoryError", "errno": errno.ENOTDIR}).encode())
        os.close(writer)
        worker.children[reader] = Child(2**22 + 1, "digest", kernel, 0.0, False)  # the id of no process
        worker.selector.register(reader, selectors.EVENT_READ)
        with mock.patch.object(Worker, "_go_private", return_value=True) as go_private:
            worker._hear(reader)
            worker._hear(reader)
        assert worker.waiting.pop("digest") is kernel and go_private.called is moved


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    process = start(environment(tmp_path), "wait")
    assert process.stdout is not None
    worker, scratch = process.stdout.readline().split()
    assert alive(int(worker)) and os.path.isdir(scratch)
    compilers = children(int(worker))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not any(map(alive, [int(worker), *compilers])))
    assert not os.path.exists(scratch)
    assert not list(tmp_path.rglob("tmp.pid*"))


def test_a_program_that_dies_is_started_again(tmp_path: Path) -> None:
    process = start(environment(tmp_path), "wait")
    assert process.stdout is not None
    worker = int(process.stdout.readline().split()[0])
    os.kill(worker, signal.SIGKILL)
    until(lambda: [pid for pid in children(process.pid) if pid != worker and alive(pid)])  # compiles what is left
    process.kill()
    process.communicate()


def test_a_cache_that_takes_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    found = result(start(environment(tmp_path / "file" / "cache")))
    assert found["done"] == 4 and found["cached"] and found["left"] == 0
    assert found["said"].count("takes no files") == 1 and not found["kept"]


def test_a_full_disk(tmp_path: Path) -> None:
    found = result(start(environment(tmp_path / "cache", site(tmp_path, FULL))))
    assert found["done"] == 4 and found["left"] == 0 and found["failed"] == []
    assert found["said"].count("takes no files") == 1


def test_a_program_that_cannot_run_is_said_once(tmp_path: Path) -> None:
    found = result(start(environment(tmp_path / "cache", site(tmp_path, BROKEN))))
    assert found["done"] == 0 and found["broken"] and found["starts"] == 3
    assert found["said"].count("kernels cannot be compiled") == 1
    assert found["stopped"] < 4.0, "a thread was waited for"


def test_it_imports_no_torch(tmp_path: Path) -> None:
    """Of PyTorch names alone, which are one object each; what else is asked of it is not there."""
    program = """
import sys
from fusedvit.runtime.compile_program import Names, worker
worker()
import torch
assert type(torch) is Names and not any(name.startswith("torch.") for name in sys.modules)
assert torch.bfloat16 is torch.bfloat16 and repr(torch.bfloat16) == "torch.bfloat16"
assert not hasattr(torch, "__path__") and not hasattr(torch.Tensor, "__len__")
"""
    subprocess.run([sys.executable, "-c", program], env=environment(tmp_path), cwd=ROOT, check=True, timeout=300)


def test_where_names_will_not_do_it_imports_torch(tmp_path: Path) -> None:
    found = result(start(environment(tmp_path / "cache", site(tmp_path, MORE_THAN_NAMES))))
    assert found["done"] == 4 and found["failed"] == [] and found["cached"] and found["broken"] == ""


def test_what_its_imports_print_is_no_answer(tmp_path: Path) -> None:
    found = result(start(environment(tmp_path / "cache", site(tmp_path, PRINTING))))
    assert found["done"] == 4 and found["cached"] and found["broken"] == ""


def test_standard_streams_that_are_closed(tmp_path: Path) -> None:
    """As some daemons have them: what is opened then gets their numbers."""
    command = ["sh", "-c", f"exec {sys.executable} -m tests.support.compiling <&- 2>&-"]
    said = subprocess.run(command, env=environment(tmp_path), cwd=ROOT, capture_output=True, timeout=300).stdout
    assert json.loads(said.splitlines()[-1])["done"] == 4


def test_a_cache_that_is_not_named(tmp_path: Path) -> None:
    found = result(start(environment("")))
    assert found["done"] == 4 and found["cached"] and not found["kept"]
    assert found["said"].count("takes no files") == 1


@pytest.mark.parametrize(
    ("variable", "name"),
    [("TRITON_CACHE_DIR", b"caf\xc3\xa9"), ("TRITON_CACHE_DIR", b"caf\xe9"), ("HOME", b"caf\xc3\xa9")],
)
def test_a_cache_whose_name_is_not_of_the_locale(variable: str, name: bytes, tmp_path: Path) -> None:
    """The locale's encoding is ASCII; Triton reads its own variable as UTF-8 in every locale."""
    env = environment("") | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    del env["TRITON_CACHE_DIR"]
    found = result(start(env | {variable: os.fsdecode(os.fsencode(tmp_path / "a") + name)}))
    assert found["done"] == 4 and found["cached"] and found["left"] == 0 and not found["kept"]
    assert found["said"].count("takes no files") == 1


def test_signals_of_children_that_are_ignored(tmp_path: Path) -> None:
    """As servers do that want no zombies; what they start inherits it."""
    env = environment(tmp_path / "cache", site(tmp_path, COUNTING)) | {"STARTS": str(tmp_path / "starts")}
    program = "import signal, runpy; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    program += "runpy.run_module('tests.support.compiling', run_name='__main__')"
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, check=True, timeout=300).stdout
    assert json.loads(said.splitlines()[-1])["done"] == 4
    assert (tmp_path / "starts").read_text().count("one more") == 1


def test_a_working_folder_that_was_removed(tmp_path: Path) -> None:
    """Python's path has an entry of it, and so has Triton's cache: it is one that nobody named then."""
    program = "import os, tempfile, tests.support.compiling as c; "
    program += "folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder); c.main()"
    for cache, kept in (str(tmp_path / "cache"), False), ("relative", True):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment(cache), cwd=ROOT, capture_output=True, timeout=300
        )
        assert json.loads(done.stdout.splitlines()[-1])["done"] == 4
        assert (b"takes no files" in done.stderr) is kept


def test_a_kernel_that_has_another_key_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of the kernel, and nothing is compiled under a key that nobody looks up. The first times it is
    looked up again: a thread may have looked it up just before settings changed."""
    monkeypatch.setattr(compile_worker.triton.runtime.driver, "set_active", lambda driver: None)
    monkeypatch.setattr(compile_worker, "is_cached", lambda digest, name: False)
    monkeypatch.setattr(compile_worker, "_lock", lambda digest: os.open(tmp_path, os.O_RDONLY))
    monkeypatch.setattr(os, "fork", mock.Mock(side_effect=AssertionError("it compiles")))
    out, job = io.StringIO(), FakeJob("a kernel")
    worker = Worker(os.getpid(), tmp_path, out)
    opened = len(os.listdir("/proc/self/fd"))
    worker._start("another digest", Waiting(job, 90, (0.0, 0), False))  # type: ignore[arg-type]
    said = json.loads(out.getvalue())
    assert said["failed"] == "another digest" and said["busy"] and "the key of a kernel" in said["error"]
    assert len(os.listdir("/proc/self/fd")) == opened
    service = CompileService()
    for broken in "", "", said["error"]:
        service._waiting["another digest"] = mock.Mock()
        service._hear(said)
        assert service.broken == broken and not service.failed and not service.waits_for(["another digest"])


def test_no_room_for_another_process(tmp_path: Path) -> None:
    """Nothing is compiled for now; beside a compiler that there is, a kernel waits for that."""
    found = result(start(environment(tmp_path / "cache", site(tmp_path, NO_ROOM_TO_FORK))))
    assert found["done"] == 0 and found["failed"] == [] and "BlockingIOError" in found["broken"]
    assert found["said"].count("for now") == 1
    job: Any = None
    kernel = Waiting(job, 90, (1.0, 0.0), False)
    worker = Worker(os.getpid(), tmp_path, sys.stdout, children={0: Child(0, "another", kernel, 0.0, False)})
    worker._do_without("digest", kernel, (), BlockingIOError(errno.EAGAIN, "full"))
    assert worker.waiting == {"digest": kernel} and kernel.since > time.monotonic()


def test_an_application_with_python_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not started as the program, which would run the application again, and that would start the next one."""
    monkeypatch.setattr(sys, "executable", "/srv/app/app/python-app")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(spawn, "get_executable", lambda: b"/srv/app/app/python-app")
    service = CompileService()
    service.start_early()
    with service.changed:
        service._start()
    assert "sys.executable" in service.broken and service._process is None


def test_what_keys_begin_with_is_computed_once_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks kernels up waits for it; what fails is raised where a key is needed, not here."""
    begun, go_on = [], threading.Event()

    def slow() -> None:
        begun.append(threading.current_thread().name)
        assert go_on.wait(10)

    monkeypatch.setattr(compile_service, "hash_compiler", slow)
    service = CompileService()
    service.wait_for_hash()
    service.hash_early()
    service.hash_early()
    waits = threading.Thread(target=service.wait_for_hash)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive() and not go_on.is_set()
    go_on.set()
    waits.join(10)
    assert not waits.is_alive() and begun == ["fusedvit-key"]


@pytest.mark.parametrize("failing", ["triton_key", "get_ptxas_version"])
def test_keys_that_cannot_be_computed(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no such file")

    tried = mock.Mock()
    monkeypatch.setattr(compile_service, "triton_key", tried)
    monkeypatch.setattr(compile_service, "get_ptxas_version", tried)
    monkeypatch.setattr(compile_service, failing, fails)
    monkeypatch.setattr(compile_service, "driver", mock.MagicMock())
    compile_service.hash_compiler()
    assert tried.call_count == 1


@pytest.mark.parametrize("name", ["fusedvit-compile", "fusedvit-send"])
def test_no_room_for_a_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that nobody could talk to is gone, and what was opened for it."""
    start = threading.Thread.start

    def full(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", full)
    service, others, before = CompileService(), {*children(os.getpid())}, len(os.listdir("/proc/self/fd"))
    with service.changed:
        service._start()
    assert service.broken == "RuntimeError: can't start new thread" and service._process is None
    service.stop()
    assert others >= {*children(os.getpid())} and len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    "cores, free, urgent, children",
    [
        (16, 64, True, 16),
        (16, 64, False, 15),
        (2, 64, False, 1),
        (1, 64, False, 1),
        (128, 64, True, 16),
        (16, 3, True, 5),
        (16, 0, True, 1),
    ],
)
def test_children_are_bounded_by_cores_and_memory(cores: int, free: int, urgent: bool, children: int) -> None:
    with (
        mock.patch.object(compile_worker, "available_cores", lambda: cores),
        mock.patch.object(compile_worker, "available_memory", lambda: free << 30),
    ):
        assert compile_worker.most_children(urgent) == children


def test_a_control_group_bounds_memory(tmp_path: Path) -> None:
    """Its page cache counts as free, as it is given back."""
    (tmp_path / "memory.max").write_text(f"{8 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{7 << 30}\n")
    (tmp_path / "memory.stat").write_text(f"anon {4 << 30}\nfile {3 << 30}\n")
    with mock.patch.object(compile_worker, "CONTROL_GROUP", tmp_path):
        assert compile_worker.available_memory() <= 4 << 30


GREEN = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
}


@pytest.mark.parametrize("late", [False, True], ids=["first", "after the import"])
@pytest.mark.parametrize("library", GREEN)
def test_threads_that_share_one_of_the_system(library: str, late: bool, tmp_path: Path) -> None:
    """As under gunicorn's and Celery's gevent workers: one that waits without such a library stops all others."""
    pytest.importorskip(library)
    imports = ["import fusedvit.runtime.compile_service"] if late else []
    program = [*imports, GREEN[library], "from tests.support import compiling", "compiling.main()"]
    command = [sys.executable, "-c", "\n".join(program)]
    done = subprocess.run(
        command, env=environment(tmp_path / "cache"), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sent"] == found["done"] == 4 and found["broken"] == "" and found["left"] == 0


def _refusing(*_: Any, **__: Any) -> None:
    raise RuntimeError("A test tried to use socket.socket.")


@pytest.mark.parametrize("refused", [False, True])
def test_answers_come_through_what_such_libraries_wait_for(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them: through a socket, which they replace, however long an answer takes, and where tests refuse any."""
    if refused:
        monkeypatch.setattr(socket, "socket", _refusing)
    socket.setdefaulttimeout(0.01)
    try:
        ours, theirs = compile_service._ends()
    finally:
        socket.setdefaulttimeout(None)
    later = threading.Timer(0.1, lambda: (theirs.write(b"an answer\n"), theirs.close()))
    later.start()
    with ours:
        assert min(ours.fileno(), theirs.fileno()) >= 3 and os.get_blocking(theirs.fileno())
        assert not os.get_inheritable(ours.fileno()) and not os.get_inheritable(theirs.fileno())
        assert isinstance(getattr(ours, "raw", None), socket.SocketIO) != refused
        assert list(ours) == [b"an answer\n"]
    later.join()
    assert not hasattr(compile_service, "SimpleQueue"), "a name that they would not replace after the import"
