"""Sharded towers: the shards are gathered once, and every rank encodes its share of each call.

Engines shard a tower over the GPUs of its language model. Each rank additionally gets a whole copy of the tower, and
the copy runs fused; the shards stay as they are. A call's items are divided over the ranks, and the rows are gathered.
A call that cannot be divided, such as one image, is encoded by every rank.

Before ranks wait for each other they agree (`agreement.py`), over the engine's own group on the CPU.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedvit.checks.adapters import Plain
from fusedvit.checks.as_built import Built, wrong_attributes, wrong_modules
from fusedvit.checks.change_detection import Snapshot
from fusedvit.checks.checked_tower import CheckedTower
from fusedvit.checks.forward_hooks import hooked
from fusedvit.checks.own_code.tower_code import own_code
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.graphs.manager import MIB
from fusedvit.model.ops import ops_for
from fusedvit.runtime.inputs import check_grid
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
    Agreement,
    Group,
    OutOfStep,
    told,
)
from fusedvit.serving.shards import Shard, layout_of

Encode = Callable[[FusedEncoder, nn.Module, torch.Tensor, torch.Tensor], torch.Tensor | None]


def agreed_whole(group: Group, make: Callable[[], tuple[nn.Module | None, str]]) -> tuple[nn.Module | None, str]:
    """Builds the whole tower on every rank; or gives None, and why every rank runs the engine's code.

    Args:
        make: builds the tower on this rank; its text says why the tower cannot, or must not, run fused, or is "".

    Raises:
        RuntimeError: this rank waited for another in vain.
    """
    whole = None
    try:
        whole, why_not = make()
    except Exception as error:  # noqa: BLE001 - the engine must start, without us
        why_not = told(error)
    agreed = Agreement(group).on("build", OWN if why_not else FUSED, why_not, BUILDING)
    return (whole, "") if agreed.state == FUSED else (None, agreed.detail)


def divided(shares: list[Share]) -> list[Share]:
    """A share for each rank; or, where only one share has items, that one alone, which every rank then encodes."""
    busy = [share for share in shares if share.pieces]
    return busy if len(busy) == 1 else shares


class _Baseline(NamedTuple):
    """The state of a rank's shards, its buffers and their modules when the shards were gathered."""

    snapshot: Snapshot
    content: ContentCheck | None

    @staticmethod
    def of(source: CheckedTower, content: bool) -> "_Baseline":
        tensors = source.read()
        check = ContentCheck.of(tensors, ops_for(tensors[0].device)) if content else None
        return _Baseline(source.snapshot(), check)

    def begin(self) -> Callable[[], bool]:
        """Starts a comparison; the returned function ends it and says whether nothing has changed."""
        content, snapshot = self.content, self.snapshot
        if content is None or not snapshot.in_place():
            return lambda: snapshot.in_place() and snapshot.unchanged()
        read = content.begin(None if content.marks is None else content.marks.here(), True, None)
        return lambda: read.wait(snapshot.unchanged).unchanged


class _Encoded(NamedTuple):
    """How one rank fared. `mine` is its rows, padded to the longest share; `all` takes those of every rank, `rows` the
    call's result. Where every rank encodes the whole call, `mine` is the result."""

    state: str
    detail: str = ""
    error: Exception | None = None
    mine: torch.Tensor | None = None
    all: torch.Tensor | None = None
    rows: torch.Tensor | None = None


@dataclass
class ShardedTower:
    """One rank's part of a tower: its shards, and the whole copy that runs fused.

    Attributes:
        sharded: the engine's tower.
        whole: the copy, of the same class with whole parameters; no other code refers to it.
        handle: the handle of `whole`.
        built: `sharded` as it was built.
        encode: the engine's call of a fused tower.
        logger: the engine's, or below it.
        stale: why shards must be gathered before the next call, or "". Only set where every rank sets it.
    """

    sharded: nn.Module
    whole: nn.Module
    handle: FusedEncoder
    built: Built
    group: Group
    encode: Encode
    logger: logging.Logger
    stale: str = "loaded"
    patience: float = PATIENCE
    _baseline: _Baseline | None = field(default=None, init=False)
    _check_content: bool = field(init=False)
    _agreement: Agreement = field(init=False)
    _said: set[str] = field(default_factory=set, init=False)
    _left: dict[str, int] = field(default_factory=dict, init=False)  # calls of the copy in original code, by reason

    def __post_init__(self) -> None:
        config = self.handle.config
        self._check_content = config.watch_data
        self.handle.reconfigure(replace(config, watch_data=False))  # no other code can write to the copy
        self._agreement = Agreement(self.group)

    def __call__(self, pixels: torch.Tensor, grid_thw: Any) -> torch.Tensor | None:
        """All rows of a call, `[tokens, (1 + deepstack) * out]`; None: every rank runs the engine's code.

        Raises:
            RuntimeError: one rank has failed; raised on every rank.
            TypeError, ValueError: as a call of the tower.
        """
        grid = check_grid(grid_thw).cpu()
        shares = shares_of(self.handle.spec, len(pixels), grid, self.group.size)
        patience = LOADING if self.stale else self.patience  # at first, ranks may compile for different times
        for _ in range(2):
            if self.stale and not self.gather(self.patience):  # every rank is at this call
                return None
            if shares is None:  # wrong input: the tower raises the best message, the same on every rank
                return self.encode(self.handle, self.whole, pixels, grid)
            found = self._encoded(pixels, divided(shares))
            try:
                agreed = self._agreement.on("call", found.state, found.detail, patience)
            except RuntimeError as error:
                self.stale = self.stale or ("out of step" if isinstance(error, OutOfStep) else "")
                raise (found.error or error) from error
            if agreed.state == FUSED:
                return found.mine if found.all is None else self._gathered(found, divided(shares))
            if agreed.state == OWN:
                self._own(agreed.detail)
                return None
            self.stale = "written to"
        raise RuntimeError("fusedvit: the shards of a tower change while they are gathered")

    def _tokens(self, shares: Sequence[Share]) -> list[int]:
        return [share.patches() // self.handle.spec.merge_size**2 for share in shares]

    def _encoded(self, pixels: torch.Tensor, shares: Sequence[Share]) -> _Encoded:
        """Encodes this rank's share. An error is returned, not raised: the other ranks must learn of it first."""
        assert self._baseline is not None, "gathered"
        share, tokens = shares[self.group.rank % len(shares)], self._tokens(shares)
        try:
            unchanged = self._baseline.begin()
            try:
                rows = self.encode(self.handle, self.whole, share.pixels_of(pixels), share.grid)
            finally:
                as_gathered = unchanged()  # after an error, too: it waits for the read that `begin` started
            if not as_gathered:
                path = hooked(self.sharded)
                return _Encoded(OWN, f"a hook on {path}") if path else self._changed()
            if rows is None:
                return _Encoded(OWN, self._why_left())
            if len(shares) == 1:
                return _Encoded(FUSED, mine=rows)
            mine = rows.new_empty(max(tokens), rows.shape[1])
            mine[: len(rows)] = rows
            return _Encoded(
                FUSED,
                mine=mine,
                all=rows.new_empty(self.group.size, *mine.shape),
                rows=rows.new_empty(sum(tokens), rows.shape[1]),
            )
        except Exception as error:  # noqa: BLE001 - out of memory, a wrong pixel: the other ranks must learn of it
            return _Encoded(FAILED, told(error), error)

    def _why_left(self) -> str:
        """Why the copy's last call ran its original code."""
        found = self.handle.stats()
        new = [kind for kind, count in found["original"].items() if count > self._left.get(kind, 0)]
        self._left = found["original"]
        return ", ".join(f"{kind}: {found['details'].get(kind, '')}".rstrip(": ") for kind in new)

    def _changed(self) -> _Encoded:
        """Changed modules or code keep the tower from running fused; changed content has the shards gathered again."""
        reason = self._reason()
        return _Encoded(OWN, reason) if reason else _Encoded(STALE)

    def _gathered(self, found: _Encoded, shares: Sequence[Share]) -> torch.Tensor:
        assert found.mine is not None and found.all is not None and found.rows is not None
        self.group.all_gather(found.all, found.mine)
        rows = [found.all[rank, :count] for rank, count in enumerate(self._tokens(shares))]
        ran = [(share, of) for share, of in zip(shares, rows, strict=True) if share.pieces]
        return in_order([share for share, _ in ran], [of for _, of in ran], out=found.rows)

    # weights

    def gather(self, seconds: float = LOADING) -> bool:
        """Fills the whole copy from all ranks' shards; False, on every rank: some rank cannot run fused.

        Args:
            seconds: how long to wait for the other ranks.

        Raises:
            RuntimeError: one rank has failed; raised on every rank.
        """
        with torch.inference_mode(False), torch.no_grad():
            return self._gather(seconds)

    def _gather(self, seconds: float) -> bool:
        why = self.stale
        layout: tuple[Shard, ...] = ()
        room = None
        self.stale = "gathering failed"
        try:
            detail = self._reason() or str(self.handle.reason(pauses=False) or "")
            layout = layout_of(self.sharded, self.whole, self.group.size)
            cut = [p for p, shard in zip(self.sharded.parameters(), layout, strict=True) if shard.dim is not None]
            room = cut[0].new_empty(self.group.size * max(p.numel() for p in cut)) if cut else None
            source = CheckedTower(self.sharded, self.handle.family, self.handle.spec, self.built)
            self._baseline = _Baseline.of(source, self._check_content)
        except Exception as error:  # noqa: BLE001 - as in `agreed_whole`
            detail = told(error)
        agreed = self._agreement.on("gather", OWN if detail else FUSED, detail or why, seconds)
        if agreed.state == OWN:
            self.stale = why
            self._own(agreed.detail)
            return False
        self._join(layout, room)  # allocates nothing: no rank fails here alone
        self.stale = ""
        held = sum(p.numel() * p.element_size() for p in self.whole.parameters()) / MIB
        self._say(
            f"{type(self.whole).__name__} ({why}): shards of {self.group.size} GPUs gathered, {held:.0f} MiB on each"
        )
        return True

    def failed(self, error: Exception) -> None:
        """Tells the other ranks, whose next step is to gather, that this rank failed before that step."""
        self.stale = "gathering failed"
        with contextlib.suppress(RuntimeError):  # the caller raises `error` instead
            self._agreement.on("gather", FAILED, told(error), LOADING)

    def _own(self, why: str) -> None:
        """Logs, once per reason, that every rank runs the engine's code."""
        if why not in self._said:
            self._said.add(why)
            self._say(f"{type(self.whole).__name__} runs the engine's own code on every rank: {why}")

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

    def _reason(self) -> str:
        """Why the whole copy cannot stand for the sharded tower; "" if it can."""
        path = hooked(self.sharded)
        if path:
            return f"a hook on {path}"
        family, spec, plain = self.handle.family, self.handle.spec, Plain.of(self.sharded)
        code = own_code(plain, family.engine)
        values = {name: value for name, value in family.engine.values.items() if name != "tp_size"}
        family = replace(family, engine=replace(family.engine, values=values))
        wrong = wrong_modules(plain, self.built, family, spec) or code.foreign
        return wrong or wrong_attributes(plain, self.built, family, spec, code)
