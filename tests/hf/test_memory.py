"""Memory that moves, loses its content or is freed under us; memory that goes when it should; outputs apart."""

import gc
import io
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.bench.towers import inputs_of
from fusedvit.checks import fallback
from fusedvit.graphs.limits import check_limits
from fusedvit.prepared_tower import MOST_MOVES
from fusedvit.runtime import readback
from tests.support.families import SHAPES, each_of, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_bitwise,
    assert_same,
    copy_of,
    fused_tower,
    outputs_of,
    ran_fused,
    storages_of,
    tiny_model,
    tiny_tower,
)
from tests.unit.graphs.stand_in import graphs_on_cpu

STRICT = fusedvit.FuseConfig(strict=True)
SMALL = [(1, 4, 4), (1, 8, 4)]
LIMITS = check_limits((4, 16, 64), 4, 8)


# memory that moves


def other_memory(p: torch.Tensor) -> None:
    """As offloading does: there, and back into new memory."""
    p.data = p.data.clone()


def freed_and_taken_again(p: torch.Tensor) -> None:
    """As FSDP does: the same storage, its memory freed and allocated anew."""
    kept, storage = p.detach().clone(), p.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    _somebody_elses.append(torch.full_like(kept, float("nan")))
    storage.resize_(size)
    p.data.copy_(kept)


def gathered(p: torch.Tensor) -> None:
    """As ZeRO-3 does: empty between uses, and the old memory is gone."""
    kept, storage = p.detach().clone(), p.untyped_storage()
    p.data = torch.empty(0, dtype=p.dtype)
    storage.resize_(0)
    p.data = kept


_somebody_elses: list[torch.Tensor] = []
MOVES = [other_memory, freed_and_taken_again, gathered]


@each_of(SHAPES)
@pytest.mark.parametrize("move", MOVES, ids=lambda f: f.__name__)
def test_parameters_that_move_are_followed(move: Callable[[torch.Tensor], None], name: str) -> None:
    """All of them, then each by itself: the same answer, and nothing prepared anew."""
    tower, handle, call = fused_tower(family_tower(name), SMALL, STRICT)
    expected = call.run(tower)
    parameters = list(tower.parameters())
    for moved in (parameters, *([p] for p in parameters[:: max(1, len(parameters) // 9)])):
        for p in moved:
            move(p)
        assert_bitwise(call.run(tower), expected)
    stats = handle.stats()
    assert stats["refreshes"] == 1 and stats["original"] == {}
    other = copy_of(tower)
    for p in (*parameters, *other.parameters()):
        p.data = p.data * 1.1  # moved, and other content
    assert_same(call.run(tower), call.run(fusedvit.unfuse(other)))
    assert handle.stats()["refreshes"] == 2


def launches_of_fingerprints() -> Any:
    """Notes what the host has compared by the time that a fingerprint kernel would read parameters."""
    real = readback.ops_for(torch.device("cpu"))
    notes: list[bool] = []

    def fingerprint(sources: Any, out: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if out.numel():
            alive = [t.untyped_storage().nbytes() > 0 for t in sources.tensors if t.numel()]
            at = [t.data_ptr() for t in sources.tensors]
            notes.append(all(alive) and at == sources.pointers.tolist())
        found: torch.Tensor = real.fingerprint(sources, out, *arguments)
        return found

    ops = SimpleNamespace(**{name: getattr(real, name) for name in vars(real)} | {"fingerprint": fingerprint})
    return mock.patch.object(readback, "ops_for", lambda device: ops), notes


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("move", MOVES, ids=lambda f: f.__name__)
def test_no_kernel_reads_through_addresses_of_before(move: Callable[[torch.Tensor], None], graphs: bool) -> None:
    """Neither the fingerprint nor a graph: any one parameter may have moved."""
    tower, handle, call = fused_tower(tiny_tower(depth=1, deepstack_visual_indexes=[0]), GRIDS["smallest"], STRICT)
    expected = call.run(tower)
    patched, notes = launches_of_fingerprints()
    replays: list[bool] = []

    def run(budget: int) -> None:
        replays.append(handle.weights.in_place())
        real(budget)

    with graphs_on_cpu(handle, LIMITS) as some, patched:
        if not graphs:
            handle.prepared.runtime = None
        call.run(tower)
        real = some.encoder.run
        with mock.patch.object(some.encoder, "run", run):
            for p in tower.parameters():
                move(p)
                answer = call.run(tower)
                for name in expected:
                    torch.testing.assert_close(answer[name], expected[name])
                handle.weights.moves = 0
    assert notes and all(notes) and all(replays)
    assert handle.stats()["original"] == {} and bool(replays) == graphs


def test_graphs_go_when_what_they_read_moves() -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"], config=STRICT)
    handle.refresh()
    with graphs_on_cpu(handle, LIMITS) as graphs:
        call.run(tower)
        assert graphs.manager.stats.captures == 1
        for move in MOVES:
            at, before = tower.blocks[0].attn.proj.weight.data_ptr(), graphs.manager.stats.captures
            move(tower.blocks[0].attn.proj.weight)
            moved = tower.blocks[0].attn.proj.weight.data_ptr() != at  # memory that was freed may be taken again
            call.run(tower)
            call.run(tower)
            assert graphs.manager.stats.captures == before + moved
            assert moved or move is freed_and_taken_again
        move(tower.blocks[0].attn.qkv.weight)  # only a prepared copy is read
        before = graphs.manager.stats.captures
        handle.weights.moves = 0
        call.run(tower)
        assert graphs.manager.stats.captures == before and handle.stats()["refreshes"] == 1


def test_graphs_are_given_up_where_parameters_move_from_call_to_call() -> None:
    tower, handle, call = fused_tower(grid=GRIDS["smallest"], config=STRICT)
    expected = call.run(tower)
    with graphs_on_cpu(handle, LIMITS) as graphs:
        for _ in range(MOST_MOVES + 3):
            for p in tower.parameters():
                other_memory(p)
            call.run(tower)
        assert graphs.manager.held_bytes() == 0 and graphs.manager.stats.captures <= MOST_MOVES + 1
        assert handle.prepared.runtime is not None and handle.prepared.runtime.graphs is None
        assert handle.weights.moves > MOST_MOVES
        handle.release()
        assert handle.weights.moves == 0
        assert_bitwise(call.run(tower), expected)


def test_a_grid_read_with_parameters_that_moved() -> None:
    """As from a GPU: their content is not compared, as it would be read through addresses of before."""
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    Call.of(tower, GRIDS["mix"]).run(tower)
    grid = torch.tensor(GRIDS["mix"])
    assert handle.weights.read_back(None, True, grid).unchanged
    other_memory(tower.blocks[1].attn.proj.weight)
    found = handle.weights.read_back(None, True, grid)
    assert not found.unchanged and found.rows == grid.tolist()


class Wrapper(torch.Tensor):
    """A tensor without memory, as libraries that quantise wrap theirs."""

    @classmethod
    def __torch_dispatch__(cls, *given: Any, **named: Any) -> Any:
        raise NotImplementedError


@each_of(SHAPES)
def test_freed_and_empty_parameters_are_left_to_the_original(name: str) -> None:
    """What it does with them is its own affair: ours reads nothing through them, and runs again when they are back."""
    for freed in ("freed", "empty", "wrapper"):
        tower = family_tower(name)
        call = Call.of(tower, SMALL)
        fusedvit.fuse(tower, STRICT)
        expected = call.run(tower)
        p = max(tower.parameters(), key=torch.Tensor.numel)
        data, content, size = p.data, p.detach().clone(), p.untyped_storage().nbytes()
        if freed == "freed":
            p.untyped_storage().resize_(0)
        elif freed == "empty":
            p.data = torch.empty(0, dtype=p.dtype)
        else:
            p.data = torch.Tensor._make_wrapper_subclass(Wrapper, p.shape, dtype=p.dtype)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"fusedvit: .*({fallback.FREED}|{fallback.MODIFIED})"):
                call.run(tower)
        data.untyped_storage().resize_(size)
        p.data = data
        data.copy_(content)
        assert_bitwise(call.run(tower), expected)


# content that is lost


def garble(tensors: Any) -> None:
    for t in tensors:
        t.copy_(torch.randint(0, 3000, t.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("level", [1, 2])
@each_of(SHAPES)
def test_sleep(name: str, level: int, graphs: bool) -> None:
    """A serving engine's sleep modes: memory comes back at the same addresses; at level 1 with its content, at level 2
    with any, and the engine writes the parameters again."""
    tower, handle, call = fused_tower(family_tower(name), SMALL, STRICT)
    expected = call.run(tower)
    kept = [p.detach().clone() for p in tower.parameters()]
    with graphs_on_cpu(handle, LIMITS) as some, torch.no_grad():
        if not graphs:
            handle.prepared.runtime = None
        call.run(tower)
        buffers = some.encoder.whole().tensors().values() if graphs else ()
        everything = [*(p.data for p in tower.parameters()), *handle.weights.get().copies(), *buffers]
        if level == 1:
            saved = [t.clone() for t in everything]
        garble(everything)
        if level == 1:
            for t, content in zip(everything, saved, strict=True):
                t.copy_(content)
        for p, content in zip(tower.parameters(), kept, strict=True):
            p.data.copy_(content)
        for _ in range(2):
            assert_same(call.run(tower), expected)
        assert handle.stats()["refreshes"] == level
        if graphs:
            assert some.manager.stats.captures == level, "static buffers may have lost their content too"


# memory that goes


def alive(storages: list[Any]) -> int:
    return sum(not torch.UntypedStorage._expired(w) for w in storages)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@each_of(SHAPES)
def test_memory_goes_with_the_model(name: str, graphs: bool) -> None:
    """At once, without a collection of cycles, and while the handle lives."""
    model = nn.ModuleList([family_tower(name)])
    call, handle = Call.of(model[0], SMALL), fusedvit.fuse(model)
    call.run(model[0])
    if graphs:
        with graphs_on_cpu(handle, LIMITS):
            call.run(model[0])
    held = storages_of([*model.parameters(), *handle.weights.get().copies()])
    tower = weakref.ref(model[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert tower() is None and alive(held) == 0
    finally:
        gc.enable()
    assert handle.state() == "gone" and handle.stats()["weights_mib"] == 0 and handle.stats()["fused"] == 1 + graphs
    assert "tower is gone" in repr(handle) and "tower is gone" in handle.report()
    for act in (handle.warmup, handle.refresh, lambda: handle.tower, lambda: handle.reconfigure(STRICT)):
        with pytest.raises(RuntimeError, match=r"fusedvit: \w+ .*is gone"):
            act()
    handle.release()


def test_memory_goes_with_a_whole_model() -> None:
    model = tiny_model()
    call, handle = Call.of(model.model.visual, SMALL), fusedvit.fuse(model)
    call.run(model.model.visual)
    held = storages_of([*model.model.visual.parameters(), *handle.weights.get().copies()])
    del model
    gc.collect()
    assert alive(held) == 0


@each_of(SHAPES)
def test_memory_goes_with_unfuse(name: str) -> None:
    tower, handle, call = fused_tower(family_tower(name), SMALL)
    expected = call.run(tower)
    held = storages_of(handle.weights.get().copies())
    fusedvit.unfuse(tower)
    assert alive(held) == 0 and handle.stats()["weights_mib"] == 0 and "graphs" not in handle.stats()
    assert handle.state() == handle.stats()["state"] == "unfused"
    assert "unfused" in repr(handle) and "unfused" in handle.report().splitlines()[0]
    assert handle.tower is tower
    for act in (
        handle.warmup,
        handle.refresh,
        lambda: handle.reconfigure(STRICT),
        lambda: handle.concatenated(call.pixels, call.grid),
    ):
        with pytest.raises(RuntimeError, match="was unfused"):
            act()
    handle.release()
    p = weakref.ref(tower)
    del tower
    gc.collect()
    assert p() is None and handle.state() == "gone"
    del expected


@each_of(SHAPES)
@pytest.mark.parametrize("move", [lambda t: t.to("meta"), lambda t: t.half(), lambda t: t.double()])
def test_memory_goes_when_parameters_move_away(move: Callable[[nn.Module], object], name: str) -> None:
    tower, handle, call = fused_tower(family_tower(name), SMALL)
    call.run(tower)
    held = storages_of([*tower.parameters(), *handle.weights.get().copies()])
    move(tower)
    handle.release()
    assert alive(held) == 0 and handle.stats()["weights_mib"] == 0


def test_release_gives_everything_back_and_the_next_call_prepares_again() -> None:
    tower, handle, call = fused_tower(grid=SMALL, config=STRICT)
    expected = call.run(tower)
    held = storages_of(handle.weights.get().copies())
    handle.release()
    assert alive(held) == 0
    assert_bitwise(call.run(tower), expected)
    assert handle.stats()["refreshes"] == 2
    ran_fused(handle, calls=2)


# outputs


@pytest.fixture(params=["eager", "graphs", "grid on the host"])
def answers(request: pytest.FixtureRequest) -> Callable[[Any, Call], dict[str, torch.Tensor]]:
    """A fused call, by each way to its outputs."""

    def run(tower: Any, call: Call) -> dict[str, torch.Tensor]:
        handle = tower.__dict__["_fusedvit"]
        if request.param == "eager":
            return call.run(tower)
        handle.refresh()
        with graphs_on_cpu(handle, LIMITS):
            call.run(tower)
            with torch.no_grad():
                pixels, named = inputs_of(tower, call.pixels, call.grid)
                if request.param == "grid on the host" and "grid_thw" in named:
                    named["grid_thw"] = call.grid.tolist()
                return outputs_of(tower(pixels, **named))

    return run


Answers = Callable[[Any, Call], dict[str, torch.Tensor]]


@each_of(SHAPES)
def test_outputs_are_tensors_of_their_own(name: str, answers: Answers) -> None:
    """Each has a storage of exactly its size, is no view, and survives what is done to the others."""
    tower, _, call = fused_tower(family_tower(name), SMALL, STRICT)
    expected = {n: t.clone() for n, t in answers(tower, call).items()}
    for victim in expected:
        got = answers(tower, call)
        assert all(t.untyped_storage().nbytes() == t.nbytes and not t._is_view() for t in got.values())
        saved = io.BytesIO()
        torch.save(got[victim], saved)
        assert saved.tell() < got[victim].nbytes + 4096
        got[victim].requires_grad_()
        others = {n: t for n, t in got.items() if n != victim}
        squares = got[victim].square().sum()
        for t in others.values():
            t.mul_(torch.nn.Parameter(torch.ones(t.shape[-1])))
        squares.backward()
        assert got[victim].grad is not None and got[victim].grad.equal(2 * got[victim].detach())
        got[victim].detach_().untyped_storage().resize_(0)
        for n, t in others.items():
            assert t.equal(expected[n]), f"{n} after {victim} was freed"


@each_of(SHAPES)
def test_concatenated(name: str) -> None:
    tower, handle, call = fused_tower(family_tower(name), SMALL)
    for _ in range(2):  # fused, then by the original code
        pixels, named = inputs_of(tower, call.pixels, call.grid)
        got = handle.concatenated(pixels, *named.values())
        with torch.no_grad():
            out = tower(pixels, *named.values())
        rows = out.last_hidden_state if out.get("pooler_output") is None else out.pooler_output
        parts = [rows, *getattr(out, "deepstack_features", ())]
        assert got.equal(torch.cat(parts, dim=1)) and got.shape[1] == len(parts) * rows.shape[1]
        tower.register_module("extra", nn.Identity())
    assert handle.stats()["fused"] == 2
