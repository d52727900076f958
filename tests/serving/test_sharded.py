"""Sharded towers on four ranks, threads of this process, without an engine: what is gathered, and what all agree on."""

import contextlib
import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fusedvit.api import fuse
from fusedvit.checks import fallback
from fusedvit.checks.as_built import Built
from fusedvit.errors import Reason
from fusedvit.serving.agreement import FAILED, FUSED, OWN, STALE, Agreement, OutOfStep
from fusedvit.serving.engine_calls import encoded
from fusedvit.serving.served import Served, writing, writing_part
from fusedvit.serving.sharded import ShardedTower, agreed_whole
from fusedvit.serving.shards import Shard, sharding_of
from tests.support.towers import vision_tower

RANKS = 4
GRID = torch.tensor([[1, 8, 8], [9, 4, 6], [1, 4, 20], [3, 8, 4]])


@dataclass
class Meeting:
    """Where the threads meet, and what each holds."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS))
    held: dict[int, Any] = field(default_factory=dict)


@dataclass
class Threads:
    """One rank's group."""

    rank: int
    meeting: Meeting
    size: int = RANKS
    gathered: int = 0

    def _all(self, mine: Any, seconds: float = 20) -> list[Any]:
        self.meeting.held[self.rank] = mine
        self.meeting.barrier.wait(seconds)
        found = [self.meeting.held[rank] for rank in range(self.size)]
        self.meeting.barrier.wait(seconds)
        return found

    def exchange(self, text: str, seconds: float) -> list[str]:
        return self._all(text, seconds)

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        self.gathered += 1
        out.copy_(torch.stack(self._all(mine.clone())))


def on_ranks(run: Callable[[Threads], Any]) -> list[Any]:
    """What `run` gives on each rank: its result, or the error that it raised."""
    meeting, found = Meeting(), [None] * RANKS

    def one(rank: int) -> None:
        try:
            found[rank] = run(Threads(rank, meeting))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found


def assert_rows(found: list[Any], want: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Of every rank."""
    for rows in found:
        torch.testing.assert_close(rows, want, rtol=tolerance, atol=tolerance)


# weights


@pytest.mark.parametrize("parts", [(12,), (4, 8), (4, 4, 4)])
def test_merged_outputs_are_joined(parts: tuple[int, ...]) -> None:
    whole = torch.arange(12 * 5 * RANKS).view(12 * RANKS, 5)
    outputs = whole.split([rows * RANKS for rows in parts])  # q, then k, then v
    shards = torch.stack([torch.cat([o.chunk(RANKS)[rank] for o in outputs]) for rank in range(RANKS)])
    found = torch.zeros_like(whole)
    Shard("qkv", 0, parts).join_(found, shards)
    assert torch.equal(found, whole)


def test_inputs_and_padded_tables_are_joined() -> None:
    whole = torch.arange(6 * 8).view(6, 8)
    found = torch.zeros_like(whole)
    Shard("proj", 1, ()).join_(found, torch.stack(whole.chunk(RANKS, 1)))
    assert torch.equal(found, whole)
    padded = torch.cat([whole, torch.full((10, 8), -1)])  # 16 rows, of which the whole table has 6
    Shard("table", 0, (4,)).join_(found.zero_(), torch.stack(padded.chunk(RANKS)))
    assert torch.equal(found, whole)


def tower_of(weight: tuple[int, ...], **attributes: Any) -> nn.Module:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(weight))
    vars(layer).update(attributes)
    return nn.ModuleDict({"layer": layer})


@pytest.mark.parametrize(
    ("shard", "whole", "attributes", "expected"),
    [
        ((6, 8), (24, 8), {"output_partition_sizes": [2, 4]}, (0, (2, 4))),
        ((6, 8), (24, 8), {}, (0, (6,))),
        ((6, 2), (6, 8), {"output_partition_sizes": [6]}, (1, (6,))),
        ((6, 8), (6, 8), {}, (None, ())),
        ((16, 8), (50, 8), {"num_embeddings": 50}, (0, (16,))),
        ((16, 8), (50, 8), {}, "layer.weight is"),
        ((3, 4), (12, 16), {}, "layer.weight is"),
        ((12, 8), (12, 8, 1), {}, "layer.weight is"),
    ],
)
def test_layouts(shard: Any, whole: Any, attributes: Any, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            sharding_of(tower_of(shard, **attributes), tower_of(whole), RANKS)
        return
    (found,) = sharding_of(tower_of(shard, **attributes), tower_of(whole), RANKS)
    assert (found.dim, found.parts if found.dim == 0 else expected[1]) == expected


# agreement


@pytest.mark.parametrize(("state", "detail"), [(FUSED, ""), (STALE, ""), (OWN, "a hook on blocks.1")])
def test_all_alike(state: str, detail: str) -> None:
    assert on_ranks(lambda group: Agreement(group).on("call", state, detail)) == [(state, detail, "", False)] * RANKS


@pytest.mark.parametrize(
    ("states", "agreed"),
    [
        ({2: OWN}, (OWN, "why 2", "rank 2")),
        ({1: STALE}, (STALE, "why 1", "rank 1")),
        ({0: STALE, 3: OWN}, (OWN, "why 3", "rank 3")),
    ],
)
def test_what_one_cannot_no_rank_does(states: dict[int, str], agreed: tuple[str, str]) -> None:
    """The engine's code is whole on every rank, and what one rank has lost all gather again."""

    def one(group: Threads) -> Any:
        state = states.get(group.rank, FUSED)
        return Agreement(group).on("call", state, f"why {group.rank}")

    assert on_ranks(one) == [(*agreed, False)] * RANKS


@pytest.mark.parametrize(
    ("differs", "kind"), [(("call", FAILED, "no memory"), RuntimeError), (("gather", FUSED, ""), OutOfStep)]
)
def test_one_that_fails_or_is_elsewhere_raises_on_all(differs: tuple[str, str, str], kind: type) -> None:
    found = on_ranks(lambda group: Agreement(group).on(*differs if group.rank == 2 else ("call", FUSED, "")))
    assert all(type(error) is kind and f"rank 2 {differs[1]}" in str(error) for error in found)
    assert all(differs[2] in str(error) and differs[0] in str(error) for error in found)


def test_a_strict_rank_is_no_part_of_what_another_says() -> None:
    def one(group: Threads) -> Any:
        said = (FAILED, "no memory") if group.rank == 1 else (FUSED, "")
        return Agreement(group, lambda: True).on("call", *said)

    assert all("rank 0 runs fused (call" in str(error) and "strict" not in str(error) for error in on_ranks(one))


def test_all_that_fail_raise() -> None:
    found = on_ranks(lambda group: Agreement(group).on("call", FAILED, "out of memory"))
    assert all(isinstance(error, RuntimeError) for error in found)


@pytest.mark.parametrize("alone", [True, False])
def test_what_cannot_be_built(alone: bool) -> None:
    """The engine starts with its own code, on every rank."""

    def make(rank: int) -> tuple[nn.Module, str]:
        if rank == 1 or not alone:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return nn.Module(), ""

    found = on_ranks(lambda group: agreed_whole(group, lambda: make(group.rank)))
    what = "OutOfMemoryError: CUDA out of memory"
    assert found == [(None, f"rank 1: {what}" if alone else what)] * RANKS


# calls


def encode(*given: Any) -> torch.Tensor | Reason:
    return encoded(lambda handle, *rest: handle.answer_or_reason(*rest, {}), *given)


@pytest.fixture(scope="module")
def towers() -> Any:
    """(a tower and its handle a rank, the answer of one that nobody shards, pixels)"""
    alone, wholes = vision_tower(), [vision_tower() for _ in range(RANKS)]
    handles = [fuse(whole) for whole in wholes]
    rows = int(GRID.prod(1).sum())
    pixels = torch.randn(rows, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = alone(pixels, grid_thw=GRID)
    return alone, wholes, handles, torch.cat([found.pooler_output, *found.deepstack_features], 1), pixels


def sharded_on(group: Threads, towers: Any, logger: Any = None) -> Any:
    """A rank's part of a tower that it gathers at its first call."""
    alone, wholes, handles, _, _ = towers
    logger = logger or SimpleNamespace(info=lambda *text: None)
    return ShardedTower(alone, wholes[group.rank], handles[group.rank], Built.of(alone), group, encode, logger)


def test_rows_come_in_order_on_every_rank(towers: Any) -> None:
    _, wholes, handles, want, pixels = towers
    lines: list[str] = []
    logger: Any = SimpleNamespace(info=lambda *text: lines.append(str(text)))

    def run(group: Threads) -> Any:
        for parameter in wholes[group.rank].parameters():
            parameter.data.zero_()
        served = sharded_on(group, towers, logger)
        with torch.inference_mode():
            rows, before = served(pixels, GRID), group.gathered
            return rows, served(pixels[:64], GRID[:1]), group.gathered - before

    for found in on_ranks(run):
        assert not isinstance(found, Exception), found
        rows, first, gathered = found
        assert gathered == 0, "one image: every rank encodes it"
        torch.testing.assert_close(rows, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(first, want[: len(first)], rtol=1e-4, atol=1e-4)
    assert len(lines) == 1, lines
    assert all(handle.stats()["items"] for handle in handles), "every rank has a share"


def test_a_gather_that_fails_is_not_taken_for_one(towers: Any) -> None:
    """The copy holds what it held, or part of it: the next call gathers."""
    _, wholes, _, want, pixels = towers

    def fails(*_: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    def run(group: Threads) -> Any:
        for parameter in wholes[group.rank].parameters():
            parameter.data.zero_()
        served = sharded_on(group, towers)
        served._join = fails
        with pytest.raises(RuntimeError, match="NCCL error"):
            served.gather()
        del served._join
        with torch.inference_mode():
            return served(pixels, GRID)

    assert_rows(on_ranks(run), want)


def test_a_rank_that_finds_other_weights_has_all_gather(towers: Any) -> None:
    _, wholes, _, want, pixels = towers

    def run(group: Threads) -> Any:
        served = sharded_on(group, towers)
        with torch.inference_mode():
            served(pixels, GRID)
            for parameter in wholes[group.rank].parameters():
                parameter.data.zero_()
            if group.rank == 1:
                served.stale = "loaded on one rank alone"
            return served(pixels, GRID)

    assert_rows(on_ranks(run), want)


def test_a_part_of_an_update_that_fails_on_one_rank_waits_for_nobody(towers: Any) -> None:
    """The others gather at the next call, to which an engine comes once every rank has answered."""
    _, _, _, want, pixels = towers
    answered = threading.Barrier(RANKS, timeout=20)

    def run(group: Threads) -> Any:
        sharded = sharded_on(group, towers)
        served = Served(sharded.handle, sharded=sharded)
        assert sharded.gather()
        with contextlib.suppress(InterruptedError), writing_part([served], "updated"):
            if group.rank == 1:
                raise InterruptedError
        answered.wait()
        assert sharded.stale == "updated"
        with torch.inference_mode():
            return sharded(pixels, GRID)

    assert_rows(on_ranks(run), want)


def test_a_rank_that_fails_before_it_gathers_tells_the_others(towers: Any) -> None:
    _, _, _, want, pixels = towers

    def run(group: Threads) -> Any:
        sharded = sharded_on(group, towers)
        served = Served(sharded.handle, sharded=sharded)
        with pytest.raises(RuntimeError, match="no such file" if group.rank == 1 else "rank 1 failed .*no such file"):
            with writing([served], "reloaded"):
                if group.rank == 1:
                    raise RuntimeError("no such file")
            served.prepare("tower", sharded.logger)
        assert sharded.stale and not served.ready
        with torch.inference_mode():
            return sharded(pixels, GRID)

    assert_rows(on_ranks(run), want)


# what a handle says, and is asked for


class Ranks:
    """A tower whose shards are whole on every rank: the ranks' parts, and calls of all at once."""

    def __init__(self) -> None:
        self.alone, wholes = vision_tower(), [vision_tower() for _ in range(RANKS)]
        self.handles = [fuse(whole) for whole in wholes]
        self.encoded = [0] * RANKS
        self.reasons: dict[int, Reason] = {}  # of ranks that cannot run fused
        built, logger = Built.of(self.alone), SimpleNamespace(info=lambda *text: None)

        def part(group: Threads) -> ShardedTower:
            rank = group.rank
            return ShardedTower(
                self.alone, wholes[rank], self.handles[rank], built, group, self.encode_on(rank), logger
            )

        self.parts: list[Any] = on_ranks(part)

    def encode_on(self, rank: int) -> Any:
        def count(*given: Any) -> torch.Tensor | Reason:
            self.encoded[rank] += 1
            return self.reasons.get(rank) or encode(*given)

        return count

    def call(self, pixels: torch.Tensor, grid: Any = GRID) -> list[Any]:
        """What each rank's call gives or raises."""

        def one(group: Threads) -> Any:
            with torch.inference_mode():
                return self.parts[group.rank](pixels, grid)

        return on_ranks(one)

    def want(self, pixels: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found = self.alone(pixels, grid_thw=GRID)
        return torch.cat([found.pooler_output, *found.deepstack_features], 1)

    def check(self, pixels: torch.Tensor, tolerance: float = 1e-4) -> None:
        assert_rows(self.call(pixels), self.want(pixels), tolerance)

    def counted(self) -> list[tuple[int, int, dict[str, int]]]:
        """(calls, fused calls, calls of the original code) of each rank."""
        stats = [handle.stats() for handle in self.handles]
        return [(each["calls"], each["fused"], each["original"]) for each in stats]


PIXELS = torch.randn(int(GRID.prod(1).sum()), 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ranks", [(1,), range(RANKS)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("ask", ["refresh", "release", "watch"])
def test_weights_that_are_asked_for_are_gathered(ask: str, ranks: Any) -> None:
    found = Ranks()
    unwatched = replace(found.handles[0].config, watch_data=False)
    for handle in found.handles:
        handle.reconfigure(unwatched)
    found.check(PIXELS)
    before = found.want(PIXELS)
    for parameter in found.alone.parameters():
        parameter.data.mul_(1.1)
    torch.testing.assert_close(found.call(PIXELS)[0], before, rtol=1e-4, atol=1e-4)
    for rank in ranks:
        handle = found.handles[rank]
        handle.reconfigure(replace(unwatched, watch_data=True)) if ask == "watch" else getattr(handle, ask)()
    found.check(PIXELS)
    gathered = [part.group.gathered for part in found.parts]
    found.check(PIXELS)
    assert [part.group.gathered - old for part, old in zip(found.parts, gathered, strict=True)] == [1] * RANKS, "rows"


def test_calls_of_the_engines_code_are_counted_with_their_reason() -> None:
    found = Ranks()
    found.check(PIXELS)
    found.reasons[1] = Reason(fallback.AUTOCAST, "to torch.float16")
    for _ in range(3):
        assert found.call(PIXELS) == [None] * RANKS
    assert found.counted() == [(4, 1, {fallback.AUTOCAST: 3})] * RANKS
    details = {handle.stats()["details"][fallback.AUTOCAST] for handle in found.handles}
    assert details == {"on rank 1: to torch.float16"}
    # gathered at the first call; of the three that are thrown away, only the first was encoded
    assert found.encoded == [2, 4, 2, 2]
    del found.reasons[1]
    found.check(PIXELS)
    found.check(PIXELS)
    assert found.counted() == [(6, 3, {fallback.AUTOCAST: 3})] * RANKS and found.encoded == [4, 6, 4, 4]
    assert all(handle.stats()["items"] == 3 * len(GRID) for handle in found.handles)


def test_calls_before_the_first_gather_are_counted() -> None:
    found = Ranks()
    hook = found.alone.blocks[1].mlp.register_forward_hook(lambda *_: None)
    for _ in range(2):
        assert found.call(PIXELS) == [None] * RANKS
    assert found.counted() == [(2, 0, {fallback.HOOKS: 2})] * RANKS and found.encoded == [0] * RANKS
    assert all(handle.reason().kind == fallback.HOOKS for handle in found.handles)
    with pytest.raises(RuntimeError, match="cannot run fused: hooks: on blocks.1.mlp"):
        found.handles[0].refresh()
    hook.remove()
    found.check(PIXELS)
    assert found.counted() == [(3, 1, {fallback.HOOKS: 2})] * RANKS
    assert all(handle.reason() is None and handle.tower is found.alone for handle in found.handles)


@pytest.mark.parametrize("given", ["a reason", "too few rows"])
def test_refused_input_is_counted(given: str) -> None:
    found = Ranks()
    grid, pixels = (Reason(fallback.ENGINE, "no grid"), PIXELS) if given == "a reason" else (GRID, PIXELS[1:])
    assert found.call(pixels, grid) == [None] * RANKS
    assert found.counted() == [(1, 0, {fallback.ENGINE: 1})] * RANKS


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("ranks", [(2,), range(RANKS)], ids=["one rank", "all ranks"])
def test_strict_raises_on_every_rank(ranks: Any, gathered: bool) -> None:
    found = Ranks()
    for rank in ranks:
        found.handles[rank].reconfigure(replace(found.handles[rank].config, strict=True))
    if gathered:
        found.check(PIXELS)
    hook = found.alone.blocks[1].mlp.register_forward_hook(lambda *_: None)
    for error in found.call(PIXELS):
        assert isinstance(error, RuntimeError) and "hooks: on blocks.1.mlp" in str(error), error
    hook.remove()
    found.check(PIXELS)


def test_answers_are_in_the_dtype_of_the_shards() -> None:
    found = Ranks()
    found.check(PIXELS)
    for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float32, 1e-4)):
        found.alone.to(dtype)
        found.check(PIXELS.to(dtype), tolerance)
    assert found.counted() == [(3, 3, {})] * RANKS


def test_shards_of_another_dtype_on_one_rank_raise_on_all() -> None:
    found = Ranks()
    found.check(PIXELS)
    found.parts[1].sharded = copy.deepcopy(found.alone).to(torch.bfloat16)
    found.handles[1].refresh()
    for error in found.call(PIXELS):
        assert isinstance(error, OutOfStep) and "torch.bfloat16" in str(error), error
    found.parts[1].sharded = found.alone
    found.check(PIXELS)


def test_a_gather_that_a_rank_refuses_is_owed() -> None:
    """Whatever asked for it: the copies have older weights, though the shards' content is known."""
    found = Ranks()
    for handle in found.handles:
        handle.reconfigure(replace(handle.config, watch_data=False))
    found.check(PIXELS)
    for parameter in found.alone.parameters():
        parameter.data.mul_(1.1)
    found.parts[0].reason = lambda: Reason(fallback.UNREAD, "x")
    on_ranks(lambda group: found.parts[group.rank].gather())
    del found.parts[0].reason
    found.check(PIXELS)
