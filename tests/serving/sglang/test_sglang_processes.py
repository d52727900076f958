"""Processes as SGLang starts them: ranks that share images or shards, and those that load no plugins by themselves."""

import copy
import json
import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from sglang.srt.server_args import ServerArgs

from tests.serving.sglang.support import GRIDS, QWEN3, QWEN25, close

SPAWNED = """
import pickle, sys
import sglang.srt.disaggregation.encoder.server as server  # as unpickling what a rank starts with does
from sglang.srt.models.registry import ModelRegistry  # as its loader does
from tests.serving.sglang import support

support.load_plugins = lambda: None
for given in sys.argv[1:]:
    assert pickle.loads(bytes.fromhex(given)).model_path == "a model"
support.start()
assert ModelRegistry.resolve_model_cls([support.QWEN3])[0].__module__ == "sglang.srt.models.qwen3_vl"
model = support.build()
server.maybe_precompile_model_kernels_after_loading(model, "cpu")
tower, grid = model.visual, support.GRIDS["mixed"]
assert support.close(support.embed(tower, grid), support.own(tower, grid))
assert vars(tower)["_fusedvit"].stats()["fused"] == 1
"""


def _run(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments], env=os.environ | environment)


def test_a_process_that_gets_options_and_loads_no_plugins() -> None:
    """As the ranks and workers of an encoder server, and Ray's actors."""
    given = ServerArgs(model_path="a model", device="cpu")
    assert _run("-c", SPAWNED, bytes(ForkingPickler.dumps(given)).hex()).wait(timeout=120) == 0
    copied = copy.deepcopy(given), copy.copy(given), pickle.loads(pickle.dumps(given))
    assert all(type(each) is ServerArgs and each == given and vars(each) == vars(given) for each in copied)


def test_a_program_that_loads_no_plugins() -> None:
    package = "fusedvit.serving.sglang_encoder"
    assert _run("-c", SPAWNED, SGLANG_EXTERNAL_MODEL_PACKAGE=package).wait(timeout=120) == 0


def test_the_program_that_compares_both_towers(tmp_path: Path) -> None:
    program, out = "fusedvit.bench.engines.sglang_bench", tmp_path / "found.json"
    options = ["--json", str(out), "--tower", "tiny", "--seconds", "0.1"]
    assert _run("-m", program, *options).wait(timeout=240) == 0
    found = json.loads(out.read_text())
    assert found["holds"] and len(found["checks"]) == 4 and all(found["checks"].values())
    for row in found["workloads"].values():
        assert {"SGLang eager", "ours"} == set(row["ms"]) and {"SGLang eager", "Hugging Face"} == set(row["parity"])


def test_two_ranks(tmp_path: Path) -> None:
    ranks = [_run("-m", "tests.serving.sglang.rank", str(r), str(tmp_path / "m"), str(tmp_path)) for r in (0, 1)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for architecture in (QWEN3, QWEN25):
        assert first[architecture]["fused"] and second[architecture]["fused"]
        for name in GRIDS:
            answer = first[architecture][name]
            assert close(answer, first[architecture][f"{name} own"]), (architecture, name)
            assert torch.equal(answer, second[architecture][name])
    for architecture in (QWEN3, QWEN25):
        mine, theirs = first["sharded"][architecture], second["sharded"][architecture]
        assert mine["fused"] and theirs["fused"]
        for name in GRIDS:
            assert close(mine[name], mine[f"{name} own"]), (architecture, name)
            assert torch.equal(mine[name], theirs[name])
    assert any("shards of 2 GPUs gathered" in line for line in first["sharded"]["lines"])
    assert not first["left alone"]["fused"] and not second["left alone"]["fused"]
    (line,) = first["left alone"]["lines"]
    assert "sharded over 2 GPUs; with --mm-enable-dp-encoder" in line and not second["left alone"]["lines"]
    for rank, found in enumerate((first["differences"], second["differences"])):
        assert close(found["hook"], found["want"]), "SGLang's own code, on both"
        assert found["counted"]["original"] == {"hooks": 1} and found["counted"]["fused"] == 1, found["counted"]
        assert found["counted"]["details"]["hooks"] == "on rank 1: on blocks.1" and "on blocks.1" in found["strict"]
        assert found["rows"] and found["fused"] == 2 and found["half"].dtype == found["half own"].dtype, found
        assert (found["half"] - found["half own"]).norm() <= 0.1 * found["half own"].norm()
        assert ("rank 0 failed OutOfMemoryError: " if rank else "") + "CUDA out of memory" in found["memory"], found
        assert not found["weights"], "gathered again on both"
        assert not found["options"], found
        assert "cannot run fused: " in found["strict at load"] and "hooks" in found["strict at load"], found
        assert f"rank {rank} waited for the other 1" in found["late"] and found["after"], found
    said = first["differences"]["lines"]
    assert any("rank 1: its weights are sharded over 2 GPUs" in line for line in said), said
