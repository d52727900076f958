"""Which CUDA graphs a call would take: the plan alone, which needs no GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedvit.graphs.limits import Limits
from fusedvit.graphs.packing import Work, pack
from fusedvit.runtime.tower_graphs import limits_for

FREE_BYTES = 16 * 2**30  # of device memory, where there is no GPU to ask


@dataclass(frozen=True)
class PackedBatch:
    """What replays together: merged tokens of `pieces` images, videos or parts of videos, in the graph of `budget`."""

    budget: int
    tokens: int
    pieces: int


@dataclass(frozen=True)
class PackedCall:
    """The batches of one call, and why each item that no graph holds runs eagerly."""

    name: str
    items: int
    batches: list[PackedBatch]
    eager: list[str]

    @property
    def padding(self) -> float:
        """Share of the replayed budgets that no token fills."""
        room = sum(batch.budget for batch in self.batches)
        return 1 - sum(batch.tokens for batch in self.batches) / room if room else 0.0


def packed_calls(handle: Any, grids: Mapping[str, Sequence[Sequence[int]]], dtype: torch.dtype) -> list[PackedCall]:
    """How calls with these rows (t, h, w) would be packed.

    Args:
        handle: of a fused tower; the limits of its graphs where it has some, else as with 16 GiB free.
    """
    stats = handle.stats().get("graphs")
    if stats is None:
        limits = limits_for(handle.spec, handle.config, dtype, FREE_BYTES)
    else:
        limits = Limits(*(stats[name] for name in ("token_budgets", "max_items", "max_frames")))
    return [_packed(name, rows, handle.spec, limits) for name, rows in grids.items()]


def _packed(name: str, rows: Sequence[Sequence[int]], spec: Any, limits: Limits) -> PackedCall:
    works = tuple(Work(t, h * w // spec.merge_unit) for t, h, w in rows)
    plan = pack(works, limits)
    batches = [
        PackedBatch(batch.budget, sum(piece.tokens for piece in batch.pieces), len(batch.pieces))
        for batch in plan.batches
    ]
    return PackedCall(name, len(rows), batches, [overflow.reason for overflow in plan.overflow])
