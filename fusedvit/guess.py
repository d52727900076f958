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
from fusedvit.streams import is_current, mark

_UNKNOWN = -1


@dataclass
class Guess:
    """A replay under way, or none where nothing was guessed.

    Attributes:
        tower, graphs: what it runs on.
        made: which making of the weights it began with.
        mark: where the current stream was before it; None on a CPU.
        budget: whose graph is replayed.
        outputs: where its outputs will be.
        over: it is settled or dropped.
    """

    tower: Tower
    graphs: Graphs
    made: int
    mark: torch.cuda.Event | None
    budget: int | None = None
    outputs: EncoderOutputs | None = None
    over: bool = False

    def settle(self, items: Sequence[Item]) -> EncoderOutputs | None:
        """The outputs, if what ran is what the plan for `items` says; None otherwise. The next guess goes by that."""
        batch, known = _sole_batch(items, self.graphs, self.tower.spec.merge_unit), self.graphs.guesses
        if len(known) >= LAYOUTS_KEPT:
            known.clear()
        known[sum([item.tokens for item in items]), len(items)] = None if batch is None else batch.budget
        outputs = self.outputs
        if outputs is None or batch is None or batch.budget != self.budget:
            self.drop()
            return None
        self.graphs.manager.count(batch)
        self.over, self.outputs = True, None
        return outputs

    def drop(self) -> None:
        """Counts a replay that is not settled as mispredicted."""
        if self.outputs is not None:
            self.graphs.manager.count(None)
        self.over, self.outputs = True, None


def begin(tower: Tower, pixels: torch.Tensor, grid: torch.Tensor, graphs: Graphs, made: int) -> Guess:
    """Enqueues a replay for `grid` `[n, 3]`, unread, on the tower's device, where its shape tells the batch.

    Args:
        pixels: `[tokens, patch_width]`, any float dtype, any device.
        made: which making of the weights is the last.
    """
    rows, unit, guess = pixels.shape[0], tower.spec.merge_unit, Guess(tower, graphs, made, mark(tower.device))
    budget = _likely(graphs, rows, grid.shape[0], unit)
    if budget is None or grid.dtype not in DTYPES or max(grid.stride()) > MOST:
        return guess
    program = graphs.program

    def load() -> None:
        program.admit(budget, grid, rows)
        program.buffers(budget).pixels[:rows].copy_(pixels, non_blocking=True)

    def unload() -> None:
        static, outputs = program.buffers(budget), new_outputs(tower, rows)
        guess.budget, guess.outputs = budget, outputs
        outputs.hidden.copy_(static.hidden[:rows])
        outputs.merged.copy_(static.merged[:, : rows // unit])

    graphs.manager.replay_unread(budget, load, unload)
    return guess


def begin_again(last: Guess | None, graphs: Graphs | None, pixels: object, grid: object, made: int) -> Guess | None:
    """`begin`, before anything is known of a call, on what the `last` one ran on; None where that is gone.

    Whatever speaks against the call is found while the replay runs, which is dropped then: its buffers are ours alone.
    """
    if last is None or last.graphs is not graphs or not _are_plain(pixels, grid, last.tower):
        return None
    assert isinstance(pixels, torch.Tensor) and isinstance(grid, torch.Tensor)
    return begin(last.tower, pixels, grid, last.graphs, made)


def _are_plain(pixels: object, grid: object, tower: Tower) -> bool:
    """Whether these are tensors of the right shapes on the tower's GPU, and nothing acts on what is done to them.

    A subclass may, and so may what traces, captures or differentiates.
    """
    return (
        type(pixels) is type(grid) is torch.Tensor
        and pixels.device == grid.device == tower.device
        and pixels.ndim == grid.ndim == 2
        and (pixels.shape[1], grid.shape[1]) == (tower.spec.patch_width, 3)
        and pixels.dtype.is_floating_point
        and not pixels.requires_grad
        and is_current(tower.device)
        and not torch.jit.is_tracing()
    )


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
