"""Whole models, and who keeps their records: hidden states that nobody reads cost no time and no memory."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedvit
from tests.support.families import INSTALLED, each_of, family_tower
from tests.support.hidden_states import runs
from tests.support.towers import GRIDS, Call, error_of, fused_tower, prompt, storages_of, tiny_model

__all__ = ["runs"]  # a fixture
STRICT = fusedvit.FuseConfig(strict=True)


HOOKED: dict[str, Callable[[Any], None]] = {"nothing": lambda model: None}


def _hooked(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    return lambda put: HOOKED.setdefault(name, put)


@_hooked("freed after each forward")
def freeing(model: Any) -> None:
    kept: dict[str, Any] = {}
    tower = model.model.visual

    def take(*_: Any) -> None:
        for name, p in tower.named_parameters():
            p.data = kept.get(name, p.data)

    def give_back(*_: Any) -> None:
        for name, p in tower.named_parameters():
            kept[name], p.data = p.data, p.data.new_empty(0)

    tower.register_forward_pre_hook(take)
    tower.register_forward_hook(give_back)


@_hooked("accelerate offloads")
def offloading(model: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device="cpu", preload_module_classes=["Qwen3VLVisionModel"])


@_hooked("FSDP2")
def sharding(model: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.model.visual, mesh=mesh)
    fully_shard(model, mesh=mesh)


@_hooked("FSDP2 of the root alone")
def sharding_at_once(model: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.fixture
def one_process(tmp_path: Any) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("put", HOOKED)
def test_a_whole_model_runs_its_tower_once(put: str, runs: list[int], one_process: Any) -> None:
    """Nobody reads the tower's hidden states, though transformers makes a tuple of its record, with or without
    gradients of the language model."""
    model = tiny_model()
    model.model.visual.requires_grad_(False)
    original = copy.deepcopy(model)
    given = prompt(model.model.visual, GRIDS["images"])
    handle = fusedvit.fuse(model)
    for m in (model, original):
        HOOKED[put](m)
    for gradients in (False, True):
        for more in ({}, {"return_dict": False}):
            with torch.set_grad_enabled(gradients):
                ours, ref = (m(**given, output_hidden_states=True, **more) for m in (model, original))
            assert error_of(ours[0].detach(), ref[0].detach()) < 1e-5
            assert not runs
    assert handle.stats()["fused"] == 4, handle.stats()


def test_a_whole_model_s_hidden_states_are_there_when_they_are_read(runs: list[int]) -> None:
    model = tiny_model()
    original, given = copy.deepcopy(model), prompt(model.model.visual, GRIDS["images"])
    fusedvit.fuse(model, STRICT)
    for more in ({}, {"return_dict": False}):
        with torch.no_grad():
            ours, ref = (m(**given, output_hidden_states=True, **more) for m in (model, original))
        before = len(runs)
        ours, ref = (r[-1] if more else r.get("image_outputs") for r in (ours, ref))
        if ref is None:  # of older transformers
            return
        index = -1 if more else "hidden_states"
        for a, b in zip(ours[index], ref[index], strict=True):
            assert error_of(a, b) < 1e-5
        assert len(runs) == before + 1


# what is kept


KEPT: dict[str, Callable[[Any], Any]] = {
    "the record": lambda r: r,
    "its tuple": lambda r: r.to_tuple(),
    "its hidden states": lambda r: r.to_tuple()[-1],
    "one of them": lambda r: torch.utils._pytree.tree_leaves(r.to_tuple()[-1])[0],
    "a cast of one": lambda r: torch.utils._pytree.tree_leaves(r.to_tuple()[-1])[0].double(),
    "a mapped record": lambda r: torch.utils._pytree.tree_map(torch.Tensor.half, r),
}


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("kept", KEPT)
def test_what_is_read_or_dropped_keeps_no_tower(kept: str, read: bool) -> None:
    """Neither parameters, prepared weights nor pixels, without a collection of cycles; until then it can be read."""
    tower, handle, call = fused_tower(config=STRICT)
    found = KEPT[kept](call.record(tower, output_hidden_states=True))
    held = storages_of([*tower.parameters(), *handle.weights.get().copies(), call.pixels])
    gone = weakref.ref(tower)
    gc.collect()
    gc.disable()
    try:
        del tower, call
        assert gone() is not None
        if read:
            pickle.dumps(found)
        else:
            del found
        assert gone() is None and all(map(torch.UntypedStorage._expired, held))
    finally:
        gc.enable()


@each_of(INSTALLED)
def test_records_of_a_family_that_are_read_keep_no_tower(name: str) -> None:
    tower, handle, call = fused_tower(family_tower(name), GRIDS["images"], STRICT)
    record = call.record(tower, output_hidden_states=True)
    held = storages_of([*tower.parameters(), *handle.weights.get().copies(), call.pixels])
    del tower, call
    assert record.hidden_states[0].isfinite().all()
    gc.collect()
    assert all(map(torch.UntypedStorage._expired, held)) and record.last_hidden_state.isfinite().all()


@pytest.mark.parametrize("whole", [False, True])
def test_a_record_that_is_dropped_keeps_no_whole_model(whole: bool) -> None:
    model = tiny_model()
    given, handle = prompt(model.model.visual, GRIDS["images"]), fusedvit.fuse(model, STRICT)
    with torch.no_grad():
        if whole:
            record = model(**given, output_hidden_states=True)
        else:
            pixels, grid = given["pixel_values"], given["image_grid_thw"]
            record = model.model.get_image_features(pixels, grid, output_hidden_states=True)
            del pixels
    held = storages_of([*model.parameters(), *handle.weights.get().copies(), given["pixel_values"]])
    del model, given, record
    gc.collect()
    assert all(map(torch.UntypedStorage._expired, held))


def test_a_tower_keeps_nothing_of_records_that_are_gone_or_read() -> None:
    tower, _, call = fused_tower(config=STRICT)
    pixels = []
    for read in (False, True):
        given = Call(call.pixels.clone(), call.grid)
        record = given.record(tower, output_hidden_states=True)
        pixels += storages_of([given.pixels])
        if read:
            walked = record.to_tuple()
            assert len(record.hidden_states) == len(walked[-1]) == 4
            del given
        else:
            del given, record
        assert torch.UntypedStorage._expired(pixels[-1])


def test_copies_of_a_tower_that_was_asked() -> None:
    """They compute for themselves."""
    tower, _, call = fused_tower(config=STRICT)
    record = call.record(tower, output_hidden_states=True)
    for other in (copy.deepcopy(tower), copy.copy(tower)):
        asked = call.record(other, output_hidden_states=True)
        for a, b in zip(asked.hidden_states, record.to_tuple()[-1], strict=True):
            assert error_of(a, b) < 1e-5
