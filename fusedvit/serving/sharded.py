"""Sharded towers: the shards are gathered once, and every rank encodes its share of each call.

Engines shard a tower over the GPUs of its language model. Each rank additionally gets a whole copy of the tower, and
the copy runs fused; the shards stay as they are. A call's items are divided over the ranks, and the rows are gathered.
A call that cannot be divided, such as one image, is encoded by every rank.

Before ranks wait for each other they agree (`agreement.py`), over the engine's own group on the CPU.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from fusedvit.checks.adapters import Plain
from fusedvit.checks.as_built import Built
from fusedvit.checks.change_detection import Snapshot
from fusedvit.checks.checked_tower import CheckedTower
from fusedvit.errors import Reason, attempted, unnamed
from fusedvit.families.base import Family
from fusedvit.graphs.manager import MIB
from fusedvit.model.items import Item
from fusedvit.model.ops import ops_for
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime.item_shares import Share, in_order, shares_of
from fusedvit.runtime.readback import ContentCheck
from fusedvit.serving.agreement import (
    BUILDING,
    FAILED,
    FUSED,
    LOADING,
    OWN,
    PATIENCE,
    STALE,
    Agreed,
    Agreement,
    Group,
    told,
)
from fusedvit.serving.shards import Shard, sharding_of

if TYPE_CHECKING:
    from fusedvit.fused_encoder import FusedEncoder

Encode = Callable[["FusedEncoder", nn.Module, torch.Tensor, torch.Tensor], torch.Tensor | Reason]

_ATTEMPTS = 3  # at a call, if shards change: gathered before the first time, they may have been written to meanwhile


def agreed_whole(
    group: Group, make: Callable[[], tuple[nn.Module | None, str]], strict: Callable[[], bool] = lambda: False
) -> tuple[nn.Module | None, str]:
    """Builds the whole tower on every rank; or gives None, and why every rank runs the engine's code.

    Args:
        make: builds the tower on this rank; its text says why the tower cannot, or must not, run fused, or is "".
        strict: whether this rank's options are strict.

    Raises:
        RuntimeError: this rank waited for another in vain; or one rank is strict, and none may run fused.
    """
    whole = None
    try:
        whole, why_not = make()
    except Exception as error:  # noqa: BLE001 - the engine must start, without us
        why_not = told(error)
    agreed = Agreement(group, strict).on("build", OWN if why_not else FUSED, why_not, BUILDING)
    why_not = agreed.why_not()
    return None if why_not else whole, why_not


def divided(shares: list[Share]) -> list[Share]:
    """A share for each rank; or, where only one share has items, that one alone, which every rank then encodes."""
    busy = [share for share in shares if share.pieces]
    return busy if len(busy) == 1 else shares


class _Baseline(NamedTuple):
    """The state of a rank's shards, its buffers and their modules when the shards were gathered.

    Attributes:
        requests: how often new weights had been asked for.
    """

    requests: int
    snapshot: Snapshot
    content: ContentCheck

    @staticmethod
    def of(source: CheckedTower, requests: int) -> "_Baseline":
        tensors = source.read()
        return _Baseline(requests, source.snapshot(), ContentCheck.of(tensors, ops_for(tensors[0].device)))

    def begin(self, check_content: bool) -> Callable[[], bool]:
        """Starts a comparison, of the content too if `check_content`; the returned function ends it and says whether
        nothing has changed."""
        content, snapshot = self.content, self.snapshot
        if not check_content or not snapshot.in_place():
            return lambda: snapshot.in_place() and snapshot.unchanged()
        read = content.begin(None if content.marks is None else content.marks.here(), True, None)
        return lambda: read.wait(snapshot.unchanged).unchanged


class _Encoded(NamedTuple):
    """How one rank fared. `mine` is its rows, padded to the longest of `shares`; `all` takes those of every rank, and
    `rows` the call's result. Where every rank encodes the whole call, `mine` is the result."""

    state: str
    detail: str = ""
    error: Exception | None = None
    shares: Sequence[Share] = ()
    mine: torch.Tensor | None = None
    all: torch.Tensor | None = None
    rows: torch.Tensor | None = None


@dataclass
class ShardedTower:
    """One rank's part of a tower: its shards, and the whole copy that runs fused.

    The handle is that of the copy, and serves `sharded`: calls of `sharded` are counted, its options are followed,
    and what keeps it from running fused is judged as for a tower that is not sharded. The copy is written here alone.

    Attributes:
        sharded: the engine's tower.
        whole: the copy, of the same class with whole parameters; no other code refers to it.
        handle: the handle of `whole`.
        built: `sharded` as it was built.
        encode: gives the rows of a share, or the reason why the engine's code must run. It does not count.
        logger: the engine's, or below it.
        stale: why shards must be gathered before the next call, or "". If this rank alone finds one, all gather.
    """

    sharded: nn.Module
    whole: nn.Module
    handle: "FusedEncoder"
    built: Built
    group: Group
    encode: Encode
    logger: logging.Logger
    stale: str = "loaded"
    patience: float = PATIENCE
    _baseline: _Baseline | None = field(default=None, init=False)
    _agreement: Agreement = field(init=False)
    _left: bool = field(default=False, init=False)  # whether the engine's code ran at last, on every rank
    _refused: bool = field(default=False, init=False)  # whether because of this rank

    def __post_init__(self) -> None:
        handle, judge = self.handle, weakref.WeakMethod(self.reason)
        self._agreement = Agreement(self.group, lambda: handle.config.strict)
        handle.serve_sharded(self.sharded, lambda: None if (of_living := judge()) is None else of_living())

    def __call__(self, pixels: torch.Tensor, grid: torch.Tensor | Reason) -> torch.Tensor | None:
        """All rows of a call, `[tokens, (1 + deepstack) * out]`; None: every rank runs the engine's code. Counts it.

        Args:
            grid: `[items, 3]`; or the reason why every rank leaves the call to the engine's code.

        Raises:
            RuntimeError: one rank has failed, or is strict and the engine's code must run; raised on every rank.
        """
        found: torch.Tensor | Reason | None = None
        grid, strict = grid if isinstance(grid, Reason) else grid.cpu(), False
        try:
            found, strict = self._rows(pixels, grid)
        finally:
            items = [] if isinstance(grid, Reason) else [*map(Item._make, grid.tolist())]
            self.handle.count(items if isinstance(found, torch.Tensor) else found, strict=strict)
        return found if isinstance(found, torch.Tensor) else None

    def _rows(self, pixels: torch.Tensor, grid: torch.Tensor | Reason) -> tuple[torch.Tensor | Reason, bool]:
        """The rows; or the reason why the engine's code must run, and whether one rank is strict."""
        patience = self.patience
        for _ in range(_ATTEMPTS):
            found, agreed = self._attempt(pixels, grid, patience)
            if agreed.state == FUSED:
                return self._gathered(found), False
            if agreed.state == STALE:
                agreed = self.gather(self.patience, agreed.detail)  # every rank is at this call
                patience = LOADING  # at first, ranks may compile for different times
            if agreed.state == OWN:
                return agreed.reason(), agreed.strict
        raise RuntimeError("fusedvit: the shards of a tower change while they are gathered")

    def _attempt(self, pixels: torch.Tensor, grid: torch.Tensor | Reason, patience: float) -> tuple[_Encoded, Agreed]:
        """Encodes this rank's share, and agrees with the others on what follows.

        After a call that ran the engine's code, ranks that had no part in that encode nothing until the others find
        their reasons gone.
        """
        waits = self._left and not self._refused and not isinstance(grid, Reason)
        found = _Encoded(FUSED) if waits else self._encoded(pixels, grid)
        agreed = self._agreed(found, patience)
        if self._left and agreed.state == FUSED:
            found = self._encoded(pixels, grid) if waits else found
            agreed = self._agreed(found, patience)
        self._left, self._refused = agreed.state == OWN, found.state == OWN
        return found, agreed

    def _agreed(self, found: _Encoded, patience: float) -> Agreed:
        try:
            return self._agreement.on("call", found.state, found.detail, patience)
        except RuntimeError as error:
            raise (found.error or error) from error

    def _encoded(self, pixels: torch.Tensor, grid: torch.Tensor | Reason) -> _Encoded:
        """Encodes this rank's share. An error is returned, not raised: the other ranks must learn of it first."""
        try:
            found = grid if isinstance(grid, Reason) else self._encoded_or_reason(pixels, grid)
        except Exception as error:  # noqa: BLE001 - out of memory, a wrong pixel: the other ranks must learn of it
            return _Encoded(FAILED, told(error), error)
        return _Encoded(OWN, str(found)) if isinstance(found, Reason) else found

    def _encoded_or_reason(self, pixels: torch.Tensor, grid: torch.Tensor) -> _Encoded | Reason:
        reason, baseline = self.reason() if self._refused else None, self._baseline
        asked = baseline is None or baseline.requests != self.handle.weights.requests
        if reason is not None or baseline is None or asked or self.stale:
            return reason or _Encoded(STALE, self.stale or "asked for")
        right = isinstance(pixels, torch.Tensor) and pixels.ndim == 2
        of_all = shares_of(self.handle.spec, len(pixels), grid, self.group.size) if right else None
        shares = divided(of_all or [])
        share = shares[self.group.rank % len(shares)] if shares else None
        given = (pixels, grid) if share is None else (share.pixels_of(pixels), share.grid)  # wrong input is refused
        unchanged = baseline.begin(self.handle.checks_content())
        try:
            found = self.encode(self.handle, self.whole, *given)
        finally:
            as_gathered = unchanged()  # after an error, too: it waits for the read that `begin` started
        if not as_gathered:
            return self.reason() or _Encoded(STALE, "written to")
        return found if isinstance(found, Reason) else self._padded(found, shares)

    def _padded(self, rows: torch.Tensor, shares: Sequence[Share]) -> _Encoded:
        if len(shares) <= 1:
            return _Encoded(FUSED, mine=rows)
        tokens = self._tokens(shares)
        mine = rows.new_empty(max(tokens), rows.shape[1])
        mine[: len(rows)] = rows
        every = rows.new_empty(self.group.size, *mine.shape)
        return _Encoded(FUSED, shares=shares, mine=mine, all=every, rows=rows.new_empty(sum(tokens), rows.shape[1]))

    def _tokens(self, shares: Sequence[Share]) -> list[int]:
        return [share.patches() // self.handle.spec.merge_size**2 for share in shares]

    def _gathered(self, found: _Encoded) -> torch.Tensor:
        assert found.mine is not None, "encoded"
        if found.all is None or found.rows is None:
            return found.mine
        self.group.all_gather(found.all, found.mine)
        rows = [found.all[rank, :count] for rank, count in enumerate(self._tokens(found.shares))]
        ran = [(share, of) for share, of in zip(found.shares, rows, strict=True) if share.pieces]
        return in_order([share for share, _ in ran], [of for _, of in ran], out=found.rows)

    # weights

    def prepare(self, warm_up: Callable[[], object]) -> None:
        """Gathers the shards, and warms up on every rank; where some rank cannot run fused, logs why.

        Raises:
            RuntimeError: one rank has failed; raised on every rank.
        """
        agreed = self.gather()
        if agreed.state == FUSED:
            self.after(warm_up)
        else:
            self._say(f"{type(self.whole).__name__} runs the engine's own code on every rank: {agreed.reason()}")

    def gather(self, seconds: float = LOADING, why: str = "") -> Agreed:
        """Fills the whole copy from all ranks' shards; or, on every rank, the reason why some rank cannot run fused.

        Args:
            seconds: how long to wait for the other ranks.
            why: another rank's reason to gather.

        Raises:
            RuntimeError: one rank has failed, or has shards of another dtype; raised on every rank.
        """
        with torch.inference_mode(False), torch.no_grad():
            return self._gather(seconds, why or self.stale or "asked for")

    def _gather(self, seconds: float, why: str) -> Agreed:
        layout: tuple[Shard, ...] = ()
        room = None
        self.stale = "gathering failed"
        try:
            detail = str(self.reason() or "")
            if not detail:
                layout = sharding_of(self.sharded, self.whole, self.group.size)
                self._take_dtypes()
                cut = [p for p, shard in zip(self.sharded.parameters(), layout, strict=True) if shard.dim is not None]
                room = cut[0].new_empty(self.group.size * max(p.numel() for p in cut)) if cut else None
                self._baseline = _Baseline.of(self._source(), self.handle.weights.requests)
        except Exception as error:  # noqa: BLE001 - as in `agreed_whole`
            detail = told(error)
        agreed = self._agreement.on(self._step(), OWN if detail else FUSED, detail, seconds)
        self._left, self._refused = agreed.state == OWN, bool(detail)
        if agreed.state == OWN:
            self.stale = why
            return agreed
        self._join(layout, room)  # allocates nothing: no rank fails here alone
        self.stale = ""
        held = sum(p.numel() * p.element_size() for p in self.whole.parameters()) / MIB
        self._say(
            f"{type(self.whole).__name__} ({why}): shards of {self.group.size} GPUs gathered, {held:.0f} MiB on each"
        )
        return agreed

    def _step(self) -> str:
        """What ranks that gather must be at: shards of two dtypes cannot be gathered."""
        return f"gather {next(self.sharded.parameters()).dtype}"

    def _take_dtypes(self) -> None:
        """Gives the copy the dtypes and the device of the shards; what it holds is lost where they differ."""
        given = dict(chain(self.sharded.named_parameters(), self.sharded.named_buffers()))
        for name, mine in chain(self.whole.named_parameters(), self.whole.named_buffers()):
            own = given.get(name, mine)
            if (mine.dtype, mine.device) != (own.dtype, own.device):
                mine.data = torch.empty_like(mine, dtype=own.dtype, device=own.device)

    def failed(self, error: Exception) -> None:
        """Tells the other ranks, whose next step is to gather, that this rank failed before that step."""
        self.stale = "gathering failed"
        with contextlib.suppress(RuntimeError):  # the caller raises `error` instead
            self._agreement.on(self._step(), FAILED, told(error), LOADING)

    def _say(self, text: str) -> None:
        if self.group.rank == 0:
            self.logger.info("fusedvit: %s", text)

    def _join(self, layout: Sequence[Shard], room: torch.Tensor | None) -> None:
        mine, whole = dict(self.sharded.named_parameters()), dict(self.whole.named_parameters())
        for shard in layout:
            own = mine[shard.name].detach()
            if shard.dim is None:
                whole[shard.name].copy_(own)
                continue
            assert room is not None
            out = room[: self.group.size * own.numel()].view(self.group.size, *own.shape)
            self.group.all_gather(out, own.contiguous())
            shard.join_(whole[shard.name], out)
        buffers = dict(self.sharded.named_buffers())
        for name, buffer in self.whole.named_buffers():
            if buffer is not buffers.get(name, buffer):
                buffer.copy_(buffers[name])

    def after(self, work: Callable[[], object]) -> None:
        """Runs `work`, which each rank does by itself, such as compiling kernels, and waits for the other ranks.

        Raises:
            RuntimeError: one rank has failed; raised on every rank.
        """
        failed = ""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the other ranks must learn of it
            failed = told(error)
        self._agreement.on("warm-up", FAILED if failed else FUSED, failed, LOADING)

    # judging

    def judged(self, why_not: Callable[[], str]) -> str:
        """Why no rank may run the tower fused, now that it has its weights; "" if all may.

        Args:
            why_not: says of this rank why it cannot, or "".

        Raises:
            RuntimeError: a rank has failed; or one is strict, and none may run fused. Raised on every rank.
        """
        agreed = Agreed(FUSED)
        if next(self.sharded.parameters()).dtype == torch.float16:  # whether fp16 holds what whole weights give
            agreed = self.gather()
        if agreed.state == FUSED:
            found = why_not()
            agreed = self._agreement.on("judge", OWN if found else FUSED, found, LOADING)
        return agreed.why_not()

    def reason(self) -> Reason | None:
        """Why the sharded tower as it stands cannot run fused, or None; waits for the GPU."""
        return self._source().reason()

    def _source(self) -> CheckedTower:
        family = self.handle.family
        values = {name: value for name, value in family.engine.values.items() if name != "tp_size"}
        family = replace(family, engine=replace(family.engine, values=values))
        return CheckedTower(self.sharded, family, self.handle.spec, self.built, wrong_parameters=self._wrong_parameters)

    def _wrong_parameters(self, plain: Plain, family: Family, spec: VisionSpec) -> str:
        found = attempted(lambda: sharding_of(self.sharded, self.whole, self.group.size), ValueError)
        return unnamed(found) if isinstance(found, Exception) else ""
