"""Whose handle: copies, replicas, other instances of the fused class, wrapped classes, and calls that race with us."""

import copy
import gc
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit import api
from fusedvit.checks import arguments, fallback
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.graphs.limits import check_limits
from fusedvit.prepared_tower import MOST_MOVES, PreparedTower
from tests.support.families import INSTALLED, each_of, family_tower
from tests.support.processors import image_processor
from tests.support.towers import (
    GRIDS,
    Call,
    assert_bitwise,
    assert_same,
    copy_of,
    fused_and_original,
    fused_tower,
    ran_fused,
    tiny_model,
    tiny_tower,
    vision_tower,
)
from tests.support.waiting import PATIENCE
from tests.unit.graphs.stand_in import graphs_on_cpu

ROOT = Path(__file__).resolve().parents[2]
STRICT = fusedvit.FuseConfig(strict=True)
Change = Callable[[torch.Tensor], torch.Tensor]


def replica_of(network: nn.Module, change: Change) -> Any:
    """What `torch.nn.parallel.replicate` makes; `change` stands for the copy to another device."""
    modules = list(network.modules())
    copies = {m: m._replicate_for_data_parallel() for m in modules}
    for module, other in copies.items():
        for name, child in module._modules.items():
            if child is not None:
                setattr(other, name, copies[child])
        for name, p in module._parameters.items():
            if p is None:
                other._parameters[name] = None
            else:
                setattr(other, name, change(p.detach()))
        for name, buffer in module._buffers.items():
            setattr(other, name, None if buffer is None else buffer.clone())
    return copies[network]


def same_attributes(tower: nn.Module, change: Change) -> Any:
    """A bare shallow copy, on weights of its own."""
    other = object.__new__(type(tower))
    other.__dict__.update(tower.__dict__)
    other.__dict__["_modules"] = {name: changed_copy(child, change) for name, child in tower._modules.items()}
    return other


def changed_copy(module: Any, change: Change) -> Any:
    other = copy.deepcopy(module)
    for p in other.parameters():
        p.data = change(p.data)
    return other


def deep(tower: nn.Module, change: Change) -> Any:
    return changed_copy(tower, change)


def shallow(tower: nn.Module, change: Change) -> Any:
    other = copy.copy(tower)
    other.__dict__["_modules"] = {name: changed_copy(child, change) for name, child in tower._modules.items()}
    return other


def pickled(tower: nn.Module, change: Change) -> Any:
    return changed_copy(pickle.loads(pickle.dumps(tower)), change)


OTHERS = [replica_of, same_attributes, shallow, deep, pickled]
CHANGES: dict[str, Change] = {"same": torch.clone, "other": lambda p: p * 1.1, "wider": torch.Tensor.double}


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("other", OTHERS, ids=lambda f: f.__name__)
def test_a_copy_runs_on_its_own_weights(other: Callable[[nn.Module, Change], Any], change: Change, used: bool) -> None:
    tower, handle, call, original = fused_and_original()
    expected = call.run(original)
    if used:
        call.run(tower)
    made, reference = other(tower, change), other(original, change)
    assert_same(call.run(made), call.run(reference))
    assert_same(call.run(tower), expected)
    known = made.__dict__["_fusedvit"]
    if other in (replica_of, same_attributes):
        assert handle.stats()["original"] == {fallback.ANOTHER_TOWER: 1}
    else:
        assert known is not handle and known.tower is made
        ran_fused(known, calls=1)
        ran_fused(handle, calls=1 + used)


@each_of(INSTALLED)
def test_replicas_of_every_family(name: str) -> None:
    tower, handle, call, original = fused_and_original(family_tower(name), [(1, 4, 4), (1, 8, 4)])
    call.run(tower)
    assert_same(call.run(replica_of(tower, torch.Tensor.double)), call.run(replica_of(original, torch.Tensor.double)))
    ran_originals = handle.stats()["original"]
    assert ran_originals == {fallback.ANOTHER_TOWER: 1}


def test_a_replica_is_refused_where_the_user_is_strict() -> None:
    tower = tiny_tower()
    fusedvit.fuse(tower, STRICT)
    with pytest.raises(RuntimeError, match="fusedvit: Qwen3VLVisionModel .*another tower: .* is a copy"):
        Call.of(tower, GRIDS["smallest"]).run(replica_of(tower, torch.clone))


@pytest.mark.parametrize("other", OTHERS, ids=lambda f: f.__name__)
def test_a_copy_can_be_fused_and_unfused_by_itself(other: Callable[[nn.Module, Change], Any]) -> None:
    if other is replica_of:
        pytest.skip("it lives for one call, and has no parameters")
    tower = tiny_tower()
    handle, call = fusedvit.fuse(tower, STRICT), Call.of(tower, GRIDS["mix"])
    call.run(tower)
    made = other(tower, torch.clone)
    own = fusedvit.fuse(made, STRICT)
    assert own is not handle and own.tower is made and fusedvit.fuse(tower) is handle
    assert_bitwise(call.run(made), call.run(tower))
    ran_fused(own, calls=1)
    fusedvit.unfuse(made)
    assert own.state() == "unfused" and handle.state() == "fused"
    call.run(made)
    call.run(tower)
    ran_fused(handle, calls=3)


@each_of(INSTALLED)
def test_other_instances_of_the_fused_class(name: str, tmp_path: Path) -> None:
    """Made by the fused class's own constructors, or loaded by it: nobody has fused them."""
    tower = family_tower(name)
    call = Call.of(tower, [(1, 4, 4), (1, 8, 4)])
    plain = type(tower)
    expected = call.run(tower)
    handle = fusedvit.fuse(tower)
    call.run(tower)
    fused = type(tower)
    tower.save_pretrained(tmp_path)
    for made in (fused(tower.config), fused._from_config(tower.config), fused.from_pretrained(tmp_path)):
        made.eval().requires_grad_(False).load_state_dict(tower.state_dict())
        for p in made.parameters():
            p.mul_(1.1)
        reference = copy_of(tower)
        fusedvit.unfuse(reference)
        with torch.no_grad():
            for p in reference.parameters():
                p.mul_(1.1)
        want = call.run(reference)
        assert_bitwise(call.run(made), want)
        own = fusedvit.fuse(made, STRICT)
        assert own is not handle
        assert_same(call.run(made), want)
        ran_fused(own, calls=1)
        fusedvit.unfuse(made)
        assert type(made) is plain
    fusedvit.unfuse(fused(tower.config))  # has no handle: only its class goes back
    assert_same(call.run(tower), expected)
    ran_fused(handle, calls=2)


@dataclass
class Server:
    """What holds a handle before its model."""

    encoder: Any
    model: Any


WAYS: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}
HELD: dict[str, Callable[[Any, Any], Any]] = {
    "handle first": lambda handle, model: (handle, model),
    "model first": lambda handle, model: (model, handle),
    "a dictionary": lambda handle, model: {"encoder": handle, "model": model},
    "a record": Server,
}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("way", WAYS)
def test_a_handle_that_is_copied_with_its_model(way: str, held: str) -> None:
    model = tiny_model().requires_grad_(False)
    handle, call = fusedvit.fuse(model, STRICT), Call.of(model.model.visual, GRIDS["mix"])
    expected = call.run(model.model.visual)
    found = WAYS[way](HELD[held](handle, model))
    parts = found if isinstance(found, tuple) else list((found if isinstance(found, dict) else vars(found)).values())
    own, other = parts[:: -1 if held == "model first" else 1]
    tower = other.model.visual
    assert own is not handle and own.tower is tower and own.config == STRICT and fusedvit.fuse(other) is own
    assert_bitwise(call.run(tower), expected)
    ran_fused(own, calls=1)
    ran_fused(handle, calls=1)
    fusedvit.unfuse(model)
    ended, other = WAYS[way]((handle, model))
    assert ended.state() == "unfused" and ended.tower is other.model.visual, "as the handle that it is a copy of"


def test_a_copy_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tower goes before its handle is whole, and nothing is said on standard error."""
    tower = tiny_tower()
    fusedvit.fuse(tower)
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PreparedTower, "__init__", interrupted)
        copy.deepcopy(tower)
    gc.collect()
    assert said == [] and fusedvit.fuse(copy.deepcopy(tower)).state() == "fused"


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_threads_that_fuse_one_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first requests of a server, say: it has one handle, which each of them gets."""

    made = FusedEncoder.__init__

    def late(self: FusedEncoder, *given: Any) -> None:
        time.sleep(0.05)
        made(self, *given)

    monkeypatch.setattr(FusedEncoder, "__init__", late)
    tower, found, part = tiny_tower(), list[Any](), image_processor(patch_size=4)
    threads = [
        threading.Thread(target=lambda given=given: found.append(fusedvit.fuse(tower, processor=given)))
        for given in (None, part, None)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 3
    original = type(part).__mro__[1]
    fusedvit.unfuse(tower)
    assert type(part) is original and found[0].state() == "unfused"


def test_a_handle_is_called_as_its_tower() -> None:
    tower, handle, call = fused_tower()
    assert torch.equal(handle(call.pixels, call.grid), handle.concatenated(call.pixels, call.grid))
    ran_fused(handle, calls=2)


def test_public_names_are_documented() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    several = fusedvit.DataParallelEncoder(tiny_tower(), ["cpu"])
    for found in (several.handle, several):
        names = [name for name in dir(found) if not name.startswith("_")]
        assert names and all(hasattr(found, name) for name in names)
        assert [name for name in names if not re.search(rf"[`.\[ ]{name}[`(.]", pages)] == []
    assert isinstance(several.handle, fusedvit.FusedEncoder) and several.handle is fusedvit.fuse(several.handle.tower)


def test_a_handle_that_is_copied_by_itself() -> None:
    """It keeps no model, and neither does its copy."""
    model = tiny_model().requires_grad_(False)
    handle = fusedvit.fuse(model)
    assert copy.copy(handle) is handle
    for way in WAYS.values():
        alone = way(handle)
        assert alone.state() == "gone" and "its tower is gone" in repr(alone)
        with pytest.raises(RuntimeError, match="is gone: a handle does not keep its model"):
            alone.warmup()
    del model
    gc.collect()
    for way in WAYS.values():
        with pytest.raises(RuntimeError, match="is gone: a handle does not keep its model"):
            way(handle)


def test_peft_modules_to_save() -> None:
    """The tower and a trainable copy of it under one wrapper: each serves itself."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model().requires_grad_(False)
    tower = model.model.visual
    original, call = copy_of(model), Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(model)
    call.run(tower)
    options = LoraConfig(r=2, target_modules=r".*language_model.*q_proj", modules_to_save=["visual"])
    wrapped, reference = get_peft_model(model, options), get_peft_model(original, options)
    for m in (wrapped, reference):
        with torch.no_grad():
            for name, p in m.named_parameters():
                if "modules_to_save" in name:
                    p.mul_(1.1)
    ours, theirs = (m.base_model.model.model.visual for m in (wrapped, reference))
    assert_same(call.run(ours), call.run(theirs))
    with wrapped.disable_adapter(), reference.disable_adapter():
        assert_same(call.run(ours), call.run(theirs))
    ran_fused(handle, calls=2)
    inner = ours.modules_to_save["default"]
    assert inner.__dict__["_fusedvit"].tower is inner
    ran_fused(inner.__dict__["_fusedvit"], calls=1)
    fusedvit.unfuse(wrapped)
    assert type(inner) is type(tower) and "_fusedvit" not in inner.__dict__
    assert_same(call.run(ours), call.run(theirs))


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """One process, on the CPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        pytest.skip("somebody else's process group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@each_of(INSTALLED)
@pytest.mark.parametrize("first", ["fuse", "shard"])
def test_a_sharded_tower(first: str, name: str, mesh: Any) -> None:
    """`fully_shard` gives the tower a class under another name, and its parameters other memory at each call."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    tower = family_tower(name)
    original, plain, call = copy_of(tower), type(tower), Call.of(tower, [(1, 4, 4), (1, 8, 4)])
    expected = call.run(original)
    handle = fusedvit.fuse(tower) if first == "fuse" else None
    fully_shard(tower, mesh=mesh, reshard_after_forward=True)
    handle = handle or fusedvit.fuse(tower)
    assert fusedvit.fuse(tower) is handle
    assert type(tower).__name__ == f"FSDP{plain.__name__}" and isinstance(tower, plain)
    taken = []
    for _ in range(MOST_MOVES + 2):
        assert_same(call.run(tower), expected)
        taken.append([torch.empty_like(p) for p in original.parameters() for _ in range(2)])
    ran_fused(handle, calls=MOST_MOVES + 2)
    assert handle.stats()["refreshes"] == 1, "nothing changed but addresses"
    fusedvit.unfuse(tower)
    assert type(tower).__mro__[1:3] == (FSDPModule, plain) and type(tower).__name__ == f"FSDP{plain.__name__}"
    assert_bitwise(call.run(tower), expected)


@each_of(INSTALLED)
def test_options_of_which_a_sharded_tower_records_nothing(name: str, mesh: Any) -> None:
    """transformers knows what to record by a class's name, so that it ignores these options under the other name."""
    from torch.distributed.fsdp import fully_shard

    tower = family_tower(name)
    arguments._known.pop(type(tower), None)
    original, call = copy_of(tower), Call.of(tower, [(1, 4, 4)])
    fully_shard(original, mesh=mesh)
    fully_shard(tower, mesh=mesh)
    handle = fusedvit.fuse(tower, STRICT)
    for wanted in (True, False):
        options = dict.fromkeys(("output_hidden_states", "output_attentions"), wanted)
        assert_same(call.run(tower, **options), call.run(original, **options))
    ran_fused(handle, calls=2)


def test_what_a_sharded_tower_says_between_calls(mesh: Any) -> None:
    """It holds shards then, which each call gathers: what matters is whether that call will run fused."""
    from torch.distributed.fsdp import fully_shard

    tower: Any = tiny_tower()
    call = Call.of(tower, GRIDS["smallest"])
    handle = fusedvit.fuse(tower)
    fully_shard(tower, mesh=mesh, reshard_after_forward=True)
    for _ in range(2):  # before the first call, and after it
        assert handle.reason() is None and "original code:" not in handle.report()
        call.run(tower)
    with pytest.raises(RuntimeError, match="patch_embed.*is a shard.*unshard"):
        handle.warmup()
    hook = tower.blocks[0].mlp.register_forward_hook(lambda *_: None)
    assert handle.reason().kind == fallback.HOOKS
    hook.remove()
    tower.blocks[0].mlp.forward = lambda x: x
    assert "blocks.0.mlp has a forward of its own" in handle.reason().detail
    del tower.blocks[0].mlp.forward
    tower.unshard()
    handle.warmup()
    assert handle.reason() is None


def test_shards_that_nothing_gathers(mesh: Any) -> None:
    """As `distribute_tensor` leaves them."""
    from torch.distributed.tensor import DTensor

    tower: Any = tiny_tower()
    handle = fusedvit.fuse(tower)
    weight = tower.blocks[0].mlp.linear_fc1
    weight.weight = torch.nn.Parameter(DTensor.from_local(weight.weight.detach(), mesh), requires_grad=False)
    assert "blocks.0.mlp.linear_fc1.weight is a shard" in handle.reason().detail
    assert handle.reason().detail.endswith("tensor parallelism never")


@pytest.mark.parametrize("original", [True, False], ids=["use_orig_params", "flat"])
def test_a_tower_that_fsdp1_flattens(original: bool, mesh: Any) -> None:
    """During calls views stand for parameters, between them the parameters themselves: for one reason."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    tower = tiny_tower()
    call = Call.of(tower, GRIDS["smallest"])
    expected = call.run(tower)
    handle = fusedvit.fuse(tower)
    call.run(tower)
    wrapped = FullyShardedDataParallel(tower, use_orig_params=original, device_id=torch.device("cpu"))
    for _ in range(2):
        with torch.no_grad():
            found = wrapped(call.pixels, call.grid).pooler_output
        # Views of a flat parameter are aligned otherwise, which may change the order of a CPU's sums.
        torch.testing.assert_close(found, expected["pooler_output"])
        reason = handle.reason()
        assert reason is not None and reason.detail == handle.stats()["details"][fallback.MODIFIED]
        assert "flat parameter of FSDP1" in reason.detail and "fully_shard" in reason.detail
    assert handle.stats()["original"] == {fallback.MODIFIED: 2}


# races


@contextmanager
def switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def calling(tower: Any, call: Call, expected: dict[str, torch.Tensor], until: threading.Event) -> tuple[Any, list[Any]]:
    """A thread that calls and compares until told to stop, and what went wrong."""
    wrong: list[Any] = []
    done = [0]

    def loop() -> None:
        while not until.is_set():
            try:
                assert_same(call.run(tower), expected)
                done[0] += 1
            except BaseException as error:  # whatever it is, the test is to see it
                wrong.append(error)
                return

    thread = threading.Thread(target=loop)
    thread.done = done  # type: ignore[attr-defined]
    return thread, wrong


def slow(started: tuple[Any, list[Any]]) -> bool:
    """Whether a thread has not called twice yet, though nothing went wrong: other programs have the processor."""
    thread, wrong = started
    return thread.done[0] < 2 and not wrong


def raced(tower: Any, call: Call, act: Callable[[], None], seconds: float, threads: int = 2) -> list[int]:
    """Calls of each thread while `act` runs again and again; every one of them right."""
    expected = {name: t.clone() for name, t in call.run(copy_of(tower)).items()}
    stop = threading.Event()
    with switching_often():
        started = [calling(tower, call, expected, stop) for _ in range(threads)]
        for thread, _ in started:
            thread.start()
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < seconds or (now < PATIENCE and any(map(slow, started))):
            act()
        stop.set()
        for thread, _ in started:
            thread.join()
    assert [wrong for _, wrong in started] == [[]] * threads
    return [thread.done[0] for thread, _ in started]


def test_calls_that_race_fuse_and_unfuse() -> None:
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["smallest"])

    def turn() -> None:
        fusedvit.fuse(tower)
        time.sleep(0.005)
        fusedvit.unfuse(tower)

    assert min(raced(tower, call, turn, seconds=1.5)) > 0


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_calls_that_race_refreshes_are_not_starved(graphs: bool) -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"], config=STRICT)
    handle.refresh()
    if graphs:
        with graphs_on_cpu(handle, check_limits((4, 16, 64), 4, 8)):
            counts = raced(tower, call, handle.refresh, seconds=2.0)
    else:
        counts = raced(tower, call, handle.refresh, seconds=2.0)
    assert min(counts) >= 2, counts
    assert handle.stats()["original"] == {}


@pytest.mark.parametrize("act", ["release", "reconfigure", "drop_graphs"])
def test_calls_that_race_release_and_reconfigure(act: str) -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    acts: dict[str, Callable[[], None]] = {
        "release": handle.release,
        "reconfigure": lambda: handle.reconfigure(fusedvit.FuseConfig(watch_data=not handle.config.watch_data)),
        "drop_graphs": handle.drop_graphs,
    }

    def turn() -> None:
        acts[act]()
        time.sleep(0.002)

    assert min(raced(tower, call, turn, seconds=1.5)) > 0
    stats = handle.stats()
    assert set(stats["eager_runs"]) == {"no GPU"} and stats["original"].keys() <= {fallback.CHANGED_DURING_CALL}


def test_reconfigure_that_races_calls_leaves_no_empty_reason() -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    handle.refresh()

    def turn() -> None:
        with graphs_on_cpu(handle, check_limits((4, 16), 4, 8)):
            time.sleep(0.003)
            handle.reconfigure(fusedvit.FuseConfig())
            time.sleep(0.001)

    assert min(raced(tower, call, turn, seconds=1.5)) > 0
    stats = handle.stats()
    assert "" not in stats["eager_runs"] and "" not in stats["original"], stats


def test_weights_that_somebody_writes_all_the_time_end_in_the_original_code() -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    real = handle.weights.read_back

    def overtaken(*arguments: Any) -> Any:
        found = real(*arguments)
        return found._replace(unchanged=False)

    handle.weights.read_back = overtaken  # type: ignore[method-assign]
    assert_bitwise(call.run(tower), call.run(fusedvit.unfuse(copy_of(tower))))
    assert handle.stats()["original"] == {fallback.CHANGED_DURING_CALL: 1}


WARMUP: dict[str, Callable[[Any], object]] = {
    "options": lambda tower: fusedvit.fuse(tower, fusedvit.FuseConfig(watch_data=False)),
    "unfuse": fusedvit.unfuse,
    "release": lambda tower: fusedvit.fuse(tower).release(),
    "refresh": lambda tower: fusedvit.fuse(tower).refresh(),
}


@pytest.mark.parametrize("name", WARMUP)
def test_progress_that_waits_for_a_thread(name: str) -> None:
    """A user's function runs under none of our locks, so that whatever it waits for goes on."""
    tower = vision_tower(depth=1, deepstack_visual_indexes=[0])
    handle, seen = fusedvit.fuse(tower), []

    def progress(budgets: Any) -> Iterator[int]:
        for budget in budgets:
            if not seen:
                other = threading.Thread(target=WARMUP[name], args=(tower,))
                other.start()
                other.join(PATIENCE)
                assert not other.is_alive()
            seen.append(budget)
            yield budget

    with graphs_on_cpu(handle, check_limits((4, 16, 64), 4, 8)) as graphs:
        handle.warmup(progress)
        goes_on = name in ("release", "refresh")
        assert seen == [64, 16, 4] and graphs.manager.stats.captures == 3 * goes_on
    assert handle.state() == ("unfused" if name == "unfuse" else "fused")


def test_a_warmup_for_calls_captures_their_budgets_the_largest_first() -> None:
    handle, seen = fusedvit.fuse(tower := tiny_tower()), list[int]()
    with graphs_on_cpu(handle, check_limits((4, 16, 64), 4, 8)) as graphs:
        handle.warmup(lambda budgets: seen.extend(budgets) or seen, calls=[[(1, 4, 4)], GRIDS["mix"], [(1, 4, 4)]])
        assert seen == [64, 4] and graphs.manager.stats.captures == 2 and not graphs.manager.is_settled(16)
        Call.of(tower, [(1, 8, 8)]).run(tower)
        assert graphs.manager.stats.captures == 3, "a budget that was left out is captured by its first call"


def test_a_handle_that_is_known_is_returned_in_nobodys_turn() -> None:
    tower = tiny_tower()
    handle, found = fusedvit.fuse(tower), []
    with api._turn.lock:
        asking = threading.Thread(target=lambda: found.append(fusedvit.fuse(tower)))
        asking.start()
        asking.join(PATIENCE)
        assert found == [handle]


def test_stats_are_of_one_moment() -> None:
    """Counters are not read while another thread writes them."""
    tower = tiny_tower()
    handle, found = fusedvit.fuse(tower), []
    asking = threading.Thread(target=lambda: found.append(handle.stats()))
    with handle._stats._lock:
        asking.start()
        asking.join(0.2)
        assert not found
        handle._stats.original["one more"] += 1
    asking.join(PATIENCE)
    assert found[0]["original"] == {"one more": 1}


def test_a_handle_of_an_earlier_import_of_this_package_is_replaced_where_options_are_given() -> None:
    """Streamlit imports a changed package again, and keeps models. The earlier import's classes are none of ours."""
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    ref, earlier = call.run(tower), fusedvit.fuse(tower)
    earlier.__class__ = type("FusedEncoder", (FusedEncoder,), {})
    assert fusedvit.fuse(tower) is earlier
    handle = fusedvit.fuse(tower, STRICT)
    assert type(handle) is FusedEncoder and earlier.state() == "unfused"
    assert_same(call.run(tower), ref)
    assert handle.stats()["fused"] == 1


def test_who_walks_over_attributes_stays_within_the_handle() -> None:
    """Libraries that trace a module (TorchLens) follow attributes and containers, and fail in modules of others."""
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    rest, seen = [handle], dict[int, Any]()
    with graphs_on_cpu(handle, check_limits((4, 16, 64), 4, 8)):
        Call.of(tower, GRIDS["mix"]).run(tower)
        while rest:
            held: Any = rest.pop()
            if id(held) not in seen and not isinstance(held, type | nn.Module):
                seen[id(held)] = held
                holds = isinstance(held, dict | list | tuple | set | frozenset)
                parts = held if holds else getattr(held, "__dict__", ())
                rest += parts.values() if isinstance(parts, dict) else parts
    modules = [held.__name__ for held in seen.values() if isinstance(held, ModuleType)]
    assert modules == [] and len(seen) < 10_000
