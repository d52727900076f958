"""A tower on a GPU whose tuning table names the cublaslt form wherever that can run."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import fusedvit
from fusedvit.bench import tune
from fusedvit.families.registry import family_of
from fusedvit.kernels import tuning_table
from fusedvit.model.plan import tasks
from tests.gpu.test_encoder import LEAST, MOST, tower_on_gpu
from tests.support.towers import Call, assert_bitwise, assert_rule, ran_fused, random_grid, twin, without_tf32

pytestmark = pytest.mark.gpu


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table of the user's that names the form for every layer that is a product and a bias."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = family_of("Qwen3VLVisionModel").spec_from_config(tower_on_gpu().config)
    keys = [task.key for task in tasks(spec, MOST, torch.bfloat16) if task.key.kind == "bias"]
    entries = [{**asdict(key), "form": "cublaslt", "config": {}, "us": 1.0} for key in keys]
    gpu = torch.cuda.get_device_name()
    tune.write(tuning_table.user_folder() / tuning_table.file_name(gpu), gpu, entries)
    yield
    tuning_table.forget()


def test_replays_and_eager_runs_have_the_same_bits(named: None) -> None:
    """Of counts below their budget, which eager buffers then have room for; and no further off than PyTorch."""
    graphed = tower_on_gpu()
    eager, original, wide = twin(graphed), twin(graphed), twin(graphed, torch.float32)
    handle = fusedvit.fuse(
        graphed, fusedvit.FuseConfig(strict=True, token_budgets=(MOST // 4,), max_items=64, max_frames=64)
    )
    alone = fusedvit.fuse(eager, fusedvit.FuseConfig(strict=True, graphs=False))
    for seed in range(6):
        call = Call.of(graphed, random_grid(seed, LEAST, MOST), seed)
        ours = call.run(graphed)
        assert_bitwise(call.run(eager), ours)
        with without_tf32():
            ref, pt = Call(call.pixels.float(), call.grid).run(wide), call.run(original)
        assert_rule(ours, ref, pt)
    assert "cublaslt: merger_fc2" in handle.report() and not handle.stats()["eager"]
    for each in (handle, alone):
        ran_fused(each, calls=6)
        each.release()
