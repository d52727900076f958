"""A corpus on Ray: actors and whole jobs are killed, and each input is there once. Runs in `make test-serving`."""

import contextlib
import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

pytest.importorskip("ray")

import numpy as np  # noqa: E402
import pyarrow  # noqa: E402
from ray.data.extensions import ArrowTensorArray  # noqa: E402

import fusedvit  # noqa: E402
from fusedvit.corpus import shards  # noqa: E402
from fusedvit.serving.ray import DEATHS  # noqa: E402
from tests.support.checkpoint import checkpoint, pictures, tiny_checkpoint  # noqa: E402

__all__ = ["checkpoint", "pictures"]  # fixtures
COUNT, SHARD = 600, 32
SHARDS = math.ceil(COUNT / SHARD)
BAD = "0300.png"
PICTURES = COUNT, (48, 80), BAD
PATIENCE = 600  # seconds


PR_SET_CHILD_SUBREAPER = 36


class Cluster:
    """`cluster.py` and all that it starts. Orphans become this process's children, so that none is lost sight of: Ray
    writes its agents' titles over the environment, and agents of a killed job live for another minute.
    """

    def __init__(self, log: IO[str], folder: str) -> None:
        self._log, self._folder = log, folder
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self, *arguments: object, cwd: Path | None = None) -> "subprocess.Popen[str]":
        own = {"RAY_AUTH_TOKEN": uuid.uuid4().hex, "TMPDIR": self._folder, "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, Path(__file__).with_name("cluster.py"), *arguments]
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
        environment = os.environ | own | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        return subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=cwd,
        )

    def processes(self, title: str = "") -> list[int]:
        """Descendants that have `title` in their command line, and have not ended."""
        parents, titles = {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                titles[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
            except OSError:  # it has ended
                continue
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
        found, level = [], {os.getpid()}
        while level := {process for process, parent in parents.items() if parent in level}:
            found += [process for process in level if title in titles[process]]
        return found

    def kill(self) -> None:
        """What is left, until nothing is: a process may have started another meanwhile, or be missing in a list that
        was read as it got another parent."""
        nothing = 0
        while nothing < 5:
            left = self.processes()
            nothing = 0 if left else nothing + 1
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tempfile.mkdtemp(prefix="ray")  # short, for sockets; a killed job leaves its files there
    with (tmp_path / "log").open("w") as log:
        found = Cluster(log, folder)
        yield found
        found.kill()
    shutil.rmtree(folder, ignore_errors=True)


def wait(until: Callable[[], Any]) -> Any:
    """What `until` returns once it is true."""
    deadline = time.monotonic() + PATIENCE
    while not (value := until()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return value


def test_killed_and_resumed(cluster: Cluster, checkpoint: Path, pictures: Path, tmp_path: Path) -> None:
    """`kill -9` of an actor with a tower, then of the job; then it is let be."""
    out = tmp_path / "out"
    job = cluster.start("shards", checkpoint, pictures, out)
    wait(lambda: job.poll() is not None or len(shards.committed(out)) >= 2)
    actor = wait(lambda: cluster.processes("Map(_Tower)"))[0]
    os.kill(actor, signal.SIGKILL)
    wait(lambda: job.poll() is not None or len(shards.committed(out)) >= 6)
    job.kill()
    cluster.kill()  # actors and agents, which Ray keeps for a minute; they hold the job's output open
    job.communicate()
    before = shards.committed(out)
    assert 6 <= len(before) < SHARDS

    job = cluster.start("shards", checkpoint, pictures, out)
    lines = job.communicate(timeout=PATIENCE)[0].splitlines()
    assert job.returncode == 0
    done = [json.loads(line) for line in lines if line.startswith("{")]
    assert {shard["number"] for shard in done} == set(range(SHARDS)) - before and len(done) == SHARDS - len(before)
    wait(lambda: not cluster.processes())

    found = [each for number in range(SHARDS) for each in shards.read(out, number)]
    assert [each.id for each in found] == sorted(map(str, pictures.glob("*.png")))
    assert [Path(each.id).name for each in found if each.error] == [BAD]
    assert not list(out.glob(".*"))
    expected = fusedvit.Embedder(checkpoint, device="cpu").embed(each.id for each in found[1::40])
    for each, wanted in zip(found[1::40], expected, strict=True):
        torch.testing.assert_close(each.rows, wanted.rows, atol=1e-5, rtol=1e-5)
        assert each.grid_thw == wanted.grid_thw


def test_the_embedder_in_map_batches(cluster: Cluster, checkpoint: Path, pictures: Path, tmp_path: Path) -> None:
    some = tmp_path / "some"
    some.mkdir()
    for i in range(40):
        (some / f"{i}.png").symlink_to(pictures / f"{i:04d}.png")
    job = cluster.start("rows", checkpoint, some, "")
    lines = job.communicate(timeout=PATIENCE)[0].splitlines()
    assert job.returncode == 0
    found = [json.loads(line) for line in lines if line.startswith("[")]
    assert sorted(path for path, _, _ in found) == sorted(map(str, some.iterdir()))
    expected = fusedvit.Embedder(checkpoint, device="cpu").embed(path for path, _, _ in found)
    for (_, number, error), wanted in zip(found, expected, strict=True):
        assert error == "" and math.isclose(number, float(wanted.rows[0, 0]), rel_tol=1e-4, abs_tol=1e-5)
    wait(lambda: not cluster.processes())


@pytest.mark.parametrize("sizes", [[(64, 48)] * 3, [(64, 48), (70, 90), (40, 44)]], ids=["one shape", "several"])
def test_pixels_in_columns_of_rays(checkpoint: Path, sizes: list[tuple[int, int]]) -> None:
    """Tables and frames, as `map_batches` passes them."""
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    table = pyarrow.table({"image": ArrowTensorArray.from_numpy(images)})
    embedder = fusedvit.Embedder(checkpoint, device="cpu")
    wanted = np.stack(embedder({"image": images})["embedding"])
    for found in (embedder(table).to_pydict(), embedder(table.to_pandas())):
        assert list(found["error"]) == [""] * 3
        np.testing.assert_allclose(np.stack(found["embedding"]), wanted, atol=1e-5)


def test_a_driver_in_another_folder_and_a_shard_that_is_left_out(
    cluster: Cluster, checkpoint: Path, pictures: Path, tmp_path: Path
) -> None:
    """Where the cluster was started there are other files of these names; the dtype is recorded."""
    for folder, first in (("driver", 0), (".", 8)):
        (tmp_path / folder / "some").mkdir(parents=True)
        for i in range(8):
            shutil.copy(pictures / f"{first + i:04d}.png", tmp_path / folder / "some" / f"{i}.png")
    job = cluster.start("elsewhere", checkpoint, tmp_path / "driver" / "some", "out", cwd=tmp_path)
    lines = [json.loads(line) for line in job.communicate(timeout=PATIENCE)[0].splitlines() if line.startswith("{")]
    assert job.returncode == 0 and sorted(line.get("number", 9) for line in lines) == [0, 1, 9]
    assert "out-2: 1 of 2 shards did not come back: [1]" in lines[-1]["error"]
    out = tmp_path / "driver" / "out"
    assert shards.committed(Path(f"{out}-2")) == {0}
    assert json.loads((out / shards.JOB).read_text())["dtype"] == "float32"
    found = [each for number in range(2) for each in shards.read(out, number)]
    assert [each.id for each in found] == [f"some/{i}.png" for i in range(8)]
    expected = fusedvit.Embedder(checkpoint, device="cpu").embed(tmp_path / "driver" / each.id for each in found)
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each.rows, wanted.rows, atol=1e-5, rtol=1e-5)
    wait(lambda: not cluster.processes())


def test_a_job_that_fails(cluster: Cluster, checkpoint: Path, pictures: Path, tmp_path: Path) -> None:
    """One line of ours, and no actor that starts again and again."""
    broken = tiny_checkpoint(tmp_path / "broken")
    os.truncate(broken / "model.safetensors", 5000)
    job = cluster.start("shards", broken, pictures, tmp_path / "out")
    job.communicate(timeout=PATIENCE)
    assert job.returncode == 1
    line = f"InputError: fusedvit: {broken / 'model.safetensors'}: no whole safetensors file"
    assert line in (tmp_path / "log").read_text()
    assert shards.committed(tmp_path / "out") == set()
    wait(lambda: not cluster.processes())


def test_a_shard_that_kills_its_actors(cluster: Cluster, checkpoint: Path, pictures: Path, tmp_path: Path) -> None:
    """The job ends, where Ray by itself would start actors again for ever."""
    job = cluster.start("deadly", checkpoint, pictures, tmp_path / "out")
    job.communicate(timeout=PATIENCE)
    assert job.returncode == 1
    assert f"actors died, as they were created or {DEATHS} times at the same shard: " in (tmp_path / "log").read_text()
    assert (tmp_path / "out-deaths").read_text() == "." * DEATHS
    wait(lambda: not cluster.processes())
