"""A fused tower inside a serving engine: prepared when the engine starts, wakes or has written to weights."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fusedvit
from fusedvit.checks.as_built import Built
from fusedvit.errors import unnamed
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.serving.agreement import Group, told
from fusedvit.serving.plugin import is_strict
from fusedvit.serving.sharded import Encode, ShardedTower, agreed_whole

SERVED = "_fusedvit_served"  # in a tower's __dict__


@dataclass
class Served:
    """A fused tower of this process.

    Attributes:
        ready: weights are prepared and graphs captured.
        lost: the tower's weights were given back, and hold nothing until they are loaded.
        sharded: this rank's part of the tower, where the engine shards its weights.
        started: the tower was prepared before, with every graph.
    """

    handle: FusedEncoder
    ready: bool = False
    lost: bool = False
    sharded: ShardedTower | None = None
    started: bool = False

    def changed(self, why: str) -> None:
        """Notes that weights were written on every rank: shards are gathered and weights prepared again, whatever
        fingerprints say."""
        self.ready = False
        self.handle.weights.outdate()
        if self.sharded is not None:
            self.sharded.stale = why

    def give_back(self, why: str, lost: bool) -> None:
        """Gives prepared weights and graphs back until `prepare`; `lost`: the tower's own weights are lost, too."""
        self.handle.release()
        self.changed(why)
        self.lost = lost

    def prepare(self, name: str, logger: logging.Logger) -> None:
        """Prepares weights and captures graphs; if that fails, calls prepare on their own or fall back.

        The first time captures every graph, so that an engine that measures memory measures all of it. Later times
        capture only the largest, with the static buffers of all. 69 graphs take 2 s, a wait at each wake-up for an
        engine that sleeps between training steps; a call that needs another graph captures it in 30 ms.

        Raises:
            RuntimeError: shards could not be gathered.
        """
        warm = functools.partial(warm_up, self.handle, name, logger, again=self.started)
        self.started = True
        if self.sharded is None:
            warm()
        else:
            self.sharded.prepare(warm)
        self.ready = True


def served_in(model: object) -> list[tuple[str, nn.Module, Served]]:
    """Path, tower and `Served` of each fused tower in `model`; none if `model` is no module."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return [(path, module, vars(module)[SERVED]) for path, module in modules if SERVED in vars(module)]


def serve_whole(
    tower: nn.Module,
    built: Built | str,
    group: Group,
    make: Callable[[], tuple[nn.Module | None, str]],
    encode: Encode,
    attach: Callable[[FusedEncoder], object],
    logger: logging.Logger,
) -> str:
    """Lets a whole copy run in a sharded tower's place, filled from the shards later; returns why it cannot, or "". The
    result is the same on every rank. `judged` decides whether it runs fused once there are weights.

    Args:
        built: `tower` as it was built; or why that is not known on this rank, so that none runs fused.
        make: builds the copy and fuses it, or says why it cannot, or must not, be fused.
        encode: see `ShardedTower`.
        attach: lets the tower call the handle of its copy: `fuse_sharded`.

    Raises:
        RuntimeError: this rank waited for another in vain; or one rank is strict, and none may run fused.
    """
    whole, why_not = agreed_whole(group, (lambda: (None, built)) if isinstance(built, str) else make, is_strict)
    if whole is not None and not isinstance(built, str):
        served: Served = vars(whole)[SERVED]
        served.sharded = ShardedTower(tower, whole, served.handle, built, group, encode, logger)
        vars(tower)[SERVED] = served
        attach(served.handle)
    return why_not


def try_to_fuse(tower: nn.Module, judge: Callable[..., str], *given: Any) -> str:
    """What `judge(tower, *given)` returns: the reason why the tower cannot run fused, or "" where it now does.

    An engine must start, whatever a tower holds that we did not foresee: an exception is a reason, too.
    """
    cls = type(tower)
    try:
        return judge(tower, *given)
    except Exception as error:
        if type(tower) is not cls:
            leave(tower)
        return told(error)


def judged(tower: nn.Module, before: Callable[[], object] = lambda: None) -> str:
    """Why a fused tower cannot run fused, now that it has its weights; it is then left to the engine's own code. "" if
    it can. Of a sharded tower, the result is the same on every rank.

    Args:
        before: runs before the tower is judged.

    Raises:
        RuntimeError: as `ShardedTower.judged`.
    """
    served: Served = vars(tower)[SERVED]

    def reason(_: nn.Module) -> str:
        before()
        return str(served.handle.reason() or "")

    ask = functools.partial(try_to_fuse, tower, reason)
    why_not = ask() if served.sharded is None else served.sharded.judged(ask)
    if why_not:
        leave(tower)
    return why_not


def leave(tower: nn.Module) -> None:
    """Restores a tower to the engine's own code."""
    fusedvit.unfuse(tower)
    vars(tower).pop(SERVED, None)


def stats_of(model: object) -> dict[str, dict[str, Any]]:
    """Counters of each fused tower in `model`, by its path."""
    return {path: served.handle.stats() for path, _, served in served_in(model)}


def prepare_awake(towers: Iterable[tuple[str, nn.Module, Served]], logger: logging.Logger) -> None:
    """Prepares those of `towers` that have their weights and are not prepared."""
    for _, tower, served in towers:
        if not served.ready and not served.lost:
            served.prepare(type(tower).__name__, logger)


@contextlib.contextmanager
def writing_part(towers: Sequence[Served], why: str) -> Iterator[None]:
    """A context for a write to the weights of `towers` on every rank that may fail half way. Ranks meet at the next
    call, so no rank waits for one that fails here."""
    try:
        yield
    finally:
        for served in towers:
            served.changed(why)


@contextlib.contextmanager
def writing(towers: Sequence[Served], why: str) -> Iterator[None]:
    """As `writing_part`, for a write after which ranks gather at once: a rank on which it fails tells the others."""
    with writing_part(towers, why):
        try:
            yield
        except Exception as error:
            for sharded in (served.sharded for served in towers if served.sharded is not None):
                sharded.failed(error)
            raise


def warm_up(handle: FusedEncoder, name: str, logger: logging.Logger, again: bool) -> None:
    """Prepares weights, captures graphs and logs what they hold; a failure is logged and left to the calls.

    The log level is INFO when weights are prepared for the first time, and DEBUG later.

    Args:
        again: every graph was captured before, so only the largest is captured.
    """
    level = logging.DEBUG if handle.weights.preparations else logging.INFO
    try:
        with torch.inference_mode(False):
            handle.warmup(progress=iter, calls=_largest_call(handle) if again else None)
    except RuntimeError as error:
        logger.warning("fusedvit: %s is not prepared, and its next call tries again: %s", name, unnamed(error))
        return
    found = handle.stats()
    graphs = found.get("graphs", {})
    budgets = graphs.get("token_budgets", ())
    how = f"{len(budgets)} token budgets up to {max(budgets)}" if budgets else "no graphs"
    logger.log(
        level,
        "fusedvit: %s (%s) runs fused: %s, %.0f MiB of prepared weights, %.0f MiB of graphs and buffers",
        *(name, handle.family.name, how, found["weights_mib"], graphs.get("held_mib", 0.0)),
    )


def _largest_call(handle: FusedEncoder) -> list[list[tuple[int, int, int]]]:
    """A call with one image that needs the largest graph; none without graphs."""
    graphs, side = handle.prepared.graphs(), handle.spec.merge_size
    return [] if graphs is None else [[(1, side, side * graphs.limits.largest)]]
