"""Replays begun before the host has read the grid: the host plans and checks while the GPU works.

Patch tokens and items are the shapes of the caller's tensors. They nearly always tell the batch: one, of one budget,
its rows in the caller's order. The device takes the grid over itself and runs nothing where that is no grid of this
call (`kernels.admit`); the host reads it later, and a guess that does not stand is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedvit.encoder import EncoderOutputs
from fusedvit.graphs.packing import Batch, sole_budget
from fusedvit.items import Item
from fusedvit.kernels.admit import DTYPES, MOST
from fusedvit.runner import LAYOUTS_KEPT, Graphs, Tower, new_outputs, steps_of

_UNKNOWN = -1


@dataclass(frozen=True)
class Guess:
    """A replay of `budget` under way, and where its outputs will be; or None for both, where nothing was guessed."""

    graphs: Graphs
    unit: int
    budget: int | None = None
    outputs: EncoderOutputs | None = None

    def settle(self, items: Sequence[Item]) -> EncoderOutputs | None:
        """The outputs, if what ran is what the plan for `items` says; None otherwise. The next guess goes by that."""
        batch, known = _sole_batch(items, self.graphs, self.unit), self.graphs.guesses
        if len(known) >= LAYOUTS_KEPT:
            known.clear()
        known[sum([item.tokens for item in items]), len(items)] = None if batch is None else batch.budget
        if batch is None or batch.budget != self.budget:
            self.drop()
            return None
        self.graphs.manager.count(batch)
        return self.outputs

    def drop(self) -> None:
        """Counts a replay under way as mispredicted."""
        if self.outputs is not None:
            self.graphs.manager.count(None)


def begin(tower: Tower, pixels: torch.Tensor, grid: torch.Tensor, graphs: Graphs) -> Guess:
    """Enqueues a replay for `grid` `[n, 3]`, unread, on the tower's device, where its shape tells the batch.

    Args:
        pixels: `[tokens, patch_width]`, any float dtype, any device.
    """
    rows, unit, nothing = pixels.shape[0], tower.spec.merge_unit, Guess(graphs, tower.spec.merge_unit)
    budget = _likely(graphs, rows, grid.shape[0], unit)
    if budget is None or grid.dtype not in DTYPES or max(grid.stride()) > MOST:
        return nothing
    program = graphs.program
    outputs: EncoderOutputs | None = None

    def load() -> None:
        program.admit(budget, grid, rows)
        program.buffers(budget).pixels[:rows].copy_(pixels, non_blocking=True)

    def unload() -> None:
        nonlocal outputs
        static = program.buffers(budget)
        outputs = new_outputs(tower, rows)
        outputs.hidden.copy_(static.hidden[:rows])
        outputs.merged.copy_(static.merged[:, : rows // unit])

    return Guess(graphs, unit, budget, outputs) if graphs.manager.replay_unread(budget, load, unload) else nothing


def _likely(graphs: Graphs, rows: int, items: int, unit: int) -> int | None:
    """The budget of the one batch that `items` of together `rows` patch tokens make: as last time, or as any would."""
    budget = graphs.guesses.get((rows, items), _UNKNOWN)
    if budget != _UNKNOWN:
        return budget
    return None if rows % unit else sole_budget(rows // unit, items, graphs.limits, graphs.cost)


def _sole_batch(items: Sequence[Item], graphs: Graphs, unit: int) -> Batch | None:
    """The batch that `items` are, if that is one, of every item whole and in order: what `kernels.admit` lets pass."""
    steps = steps_of(graphs, tuple(items), unit)
    alone = len(steps) == 1 and len(steps[0].runs) == 1 and len(steps[0].rows) == len(items)
    return steps[0].batch if alone else None
