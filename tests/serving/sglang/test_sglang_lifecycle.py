"""Weights that are updated, given back and taken again, through SGLang's own managers."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    EndWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_context
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from fusedvit.fused_encoder import FusedEncoder
from fusedvit.serving import sglang
from tests.serving.sglang.support import GRIDS, build, close, embed, loaded, own, tower_of

IMAGES = GRIDS["images"]


def worker_of(model: Any) -> Any:
    unused = dict.fromkeys(("update_model_fields", "recapture_cuda_graph", "get_model_runner"))
    updater = WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        **unused,
    )
    runner = SimpleNamespace(model=model, weight_updater=updater)
    return SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)])


def manager_of(model: Any) -> SchedulerWeightUpdaterManager:
    return SchedulerWeightUpdaterManager(
        tp_worker=worker_of(model),
        draft_worker=None,
        memory_saver_adapter=TorchMemorySaverAdapter.create(enable=False),
        flush_cache=lambda **kwargs: True,
        is_fully_idle=lambda **kwargs: True,
    )


@pytest.mark.parametrize("load_format", (None, "direct"), ids=str)
def test_updated_weights_are_seen(load_format: str | None) -> None:
    model = loaded(build())
    tower, manager = tower_of(model), manager_of(model)
    before = embed(tower, IMAGES)
    prefix = "visual." if load_format else "model.visual."
    named = [(prefix + n, torch.randn_like(p) * 0.05) for n, p in tower.named_parameters() if n != "pos_embed.weight"]
    if load_format is None:  # names of a checkpoint
        named = [(name.replace("qkv_proj", "qkv"), value) for name, value in named]
    assert manager.begin_weight_update(BeginWeightUpdateReqInput(selector="all")).success
    (_, runner), *_ = manager.tp_worker.weight_update_runners()
    assert runner.weight_updater.update_weights_from_tensor(named, load_format=load_format)[0]
    assert manager.end_weight_update(EndWeightUpdateReqInput()).success
    answer = embed(tower, IMAGES)
    assert not close(answer, before) and close(answer, own(tower, IMAGES))
    assert torch.equal(tower.merger.linear_fc1.weight, dict(named)[prefix + "merger.linear_fc1.weight"])
    assert vars(tower)["_fusedvit"].stats()["fused"] == 2


@pytest.mark.parametrize("how", ("tensor", "distributed", "a part that fails", "reset", "begin"))
def test_parts_of_an_update(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call between two parts, or after one that failed; with `watch_data` off, as only the hooks tell."""
    monkeypatch.setenv("FUSEDVIT_CONFIG", '{"watch_data": false}')
    model = loaded(build())
    tower, manager = tower_of(model), manager_of(model)
    before = embed(tower, IMAGES)
    manager.scheduler = SimpleNamespace(record_weight_version_change=lambda **_: None)
    parameters = [(n.replace("qkv_proj", "qkv"), p) for n, p in tower.named_parameters() if n != "pos_embed.weight"]
    named = [(f"model.visual.{name}", torch.randn_like(p) * 0.05) for name, p in parameters]
    manager.tp_worker.deserialize_own_rank = lambda given: given
    monkeypatch.setattr(WeightUpdater, "receive_weights_from_distributed", lambda *_, **__: named)
    request = SimpleNamespace(serialized_named_tensors=named, selector="all", load_format=None, weight_version=None)
    vars(request).update(flush_cache=False, names=[], dtypes=[], shapes=[], group_name="")

    def write(*_: Any, **__: Any) -> None:
        for _, parameter in parameters:
            parameter.data.mul_(1.3)

    if how == "begin":
        monkeypatch.setattr(WeightUpdater, "begin_weight_update", write)
    if how == "reset":
        manager.tp_worker.model_runner.check_weights = write
        assert manager.check_weights(CheckWeightsReqInput(action="reset_tensors")).success
    else:
        assert manager.begin_weight_update(BeginWeightUpdateReqInput(selector="all")).success
    if how == "a part that fails":
        request.serialized_named_tensors = [*named, ("model.visual.merger.linear_fc2.weight", torch.zeros(1, 2))]
        with pytest.raises(Exception, match="shape|size"):
            manager.update_weights_from_tensor(request)
    elif how in ("tensor", "distributed"):
        embed(tower, IMAGES)
        assert getattr(manager, f"update_weights_from_{how}")(request).success
    answer = embed(tower, IMAGES)
    assert close(answer, own(tower, IMAGES)) and not close(answer, before)


def test_a_hook_that_comes_and_goes_leaves_prepared_weights() -> None:
    tower = tower_of(loaded(build()))
    for _ in range(2):
        hook = tower.blocks[1].register_forward_hook(lambda *_: None)
        embed(tower, IMAGES)
        hook.remove()
        embed(tower, IMAGES)
    stats = vars(tower)["_fusedvit"].stats()
    assert (stats["fused"], stats["original"], stats["refreshes"]) == (2, {"hooks": 2}, 1)


def test_weights_that_are_only_compared_stay_prepared() -> None:
    model = loaded(build())
    manager = manager_of(model)
    for action in ("snapshot", "compare", "checksum"):
        manager.tp_worker.model_runner.check_weights = lambda **_: None
        assert manager.check_weights(CheckWeightsReqInput(action=action)).success
    assert vars(tower_of(model))["_fusedvit_served"].ready


@pytest.mark.parametrize("saver", (False, True), ids=("kept", "lost"))
def test_memory_is_given_back_and_taken_again(saver: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang.fusedvit")
    model = loaded(build())
    tower, manager = tower_of(model), manager_of(model)
    served, want = vars(tower)["_fusedvit_served"], embed(tower, IMAGES)
    held = vars(tower)["_fusedvit"].stats()["weights_mib"]
    manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    assert served.ready and vars(tower)["_fusedvit"].stats()["weights_mib"] == held
    with get_context().override_server_args(device="cpu", enable_memory_saver=saver):
        manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["weights", "cuda_graph"]))
    assert not served.ready and not vars(tower)["_fusedvit"].stats()["weights_mib"]
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["cuda_graph"]))
    assert not served.ready  # its weights are away
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["weights"]))
    assert served.ready is not saver
    manager.begin_weight_update(BeginWeightUpdateReqInput(selector="all"))
    manager.end_weight_update(EndWeightUpdateReqInput())
    assert served.ready and caplog.text.count("runs fused") == 1, "said once"
    assert torch.equal(embed(tower, IMAGES), want)


def test_an_update_that_fails_on_one_rank_is_told_to_those_that_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sharded tower whose weights are lost: ranks with the update gather at once, and would wait for this one."""
    model, said = loaded(build()), list[str]()
    served, manager = vars(tower_of(model))["_fusedvit_served"], manager_of(model)
    served.sharded = SimpleNamespace(failed=lambda error: said.append(str(error)), stale="", prepare=lambda _: None)
    monkeypatch.setattr(WeightUpdater, "update_weights_from_disk", lambda *_, **__: (False, "no such file"))
    request = SimpleNamespace(model_path="", load_format="", recapture_cuda_graph=False, flush_cache=False)
    for lost, away, want in ((False, set(), 0), (True, {"cuda_graph"}, 0), (True, set(), 1)):
        served.lost, served.ready, manager.offload_tags = lost, not lost, away
        assert not manager.update_weights_from_disk(request).success
        assert said == ["no such file"] * want and served.lost == lost


def test_a_draft_models_tower_goes_with_the_other() -> None:
    """Where a draft model has one of its own; one that it shares is prepared once."""
    target, draft = loaded(build()), loaded(build())
    towers = tower_of(target), tower_of(draft)
    manager = manager_of(target)
    manager.draft_worker = SimpleNamespace(
        weight_update_runners=lambda: [("draft", SimpleNamespace(model=model)) for model in (draft, target)]
    )
    want = [embed(tower, IMAGES) for tower in towers]
    manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["weights", "cuda_graph"]))
    assert [vars(tower)["_fusedvit"].stats()["weights_mib"] for tower in towers] == [0, 0]
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["weights", "cuda_graph"]))
    assert all(vars(tower)["_fusedvit_served"].ready for tower in towers)
    assert all(torch.equal(embed(tower, IMAGES), wanted) for tower, wanted in zip(towers, want, strict=True))
    assert len(sglang._served_of(manager)) == 2


def test_a_release_that_is_refused_takes_nothing() -> None:
    model = loaded(build())
    manager = manager_of(model)
    manager.is_fully_idle = lambda **kwargs: False
    with pytest.raises(AssertionError, match="idle"):
        manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=None))
    assert vars(tower_of(model))["_fusedvit_served"].ready


def test_counters_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang.fusedvit")
    model = loaded(build())
    embed(tower_of(model), IMAGES)
    Scheduler.fusedvit_report(SimpleNamespace(tp_worker=worker_of(model)))
    assert "fusedvit: visual: {'calls': 1, 'fused': 1" in caplog.text


def test_a_rotary_table_that_grows_is_the_same_table() -> None:
    tower = tower_of(loaded(build()))
    want = embed(tower, IMAGES)
    tower.rotary_pos_emb._ensure_cos_sin_cache_length(9000)
    assert torch.equal(embed(tower, IMAGES), want) and vars(tower)["_fusedvit"].stats()["fused"] == 2


def test_weights_that_cannot_be_prepared_are_left_to_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: FusedEncoder, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(FusedEncoder, "warmup", fails)
    tower = tower_of(loaded(build()))
    assert close(embed(tower, IMAGES), own(tower, IMAGES))
