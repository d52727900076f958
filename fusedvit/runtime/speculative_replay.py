"""Replays begun before the host has checked the call, or even read its grid: that it does while the GPU works.

Patch tokens and items are the shapes of the caller's tensors. They nearly always tell the batch: one, of one budget,
its rows in the caller's order. The device takes a grid that lies there over itself and runs nothing where that is no
grid of this call (`kernels.load_inputs`); the host reads it later, and a guess that does not stand is dropped. A grid on the
host tells the batch for certain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedvit.graphs.packing import Batch, sole_budget
from fusedvit.kernels.load_inputs import GRID_DTYPES, MAX_ROWS
from fusedvit.model.encoder import EncoderOutputs
from fusedvit.runtime.inputs import Item, check_grid, check_items
from fusedvit.runtime.readback import Mark, is_current
from fusedvit.runtime.runner import LAYOUTS_KEPT, Graphs, Read, Tower, new_outputs, steps_of

_UNKNOWN = -1


@dataclass(slots=True)
class Guess:
    """A replay under way, or none where nothing was guessed.

    Attributes:
        tower, graphs: what it runs on.
        made: which making of the weights it began with.
        mark: where the current stream was before it; None on a CPU, or where nobody will look from there.
        budget: whose graph is replayed, if any.
        outputs: where its outputs will be; None where nothing is replayed, or it is settled or dropped.
        over: it is settled or dropped.
    """

    tower: Tower
    graphs: Graphs
    made: int
    mark: Mark | None
    budget: int | None
    outputs: EncoderOutputs | None
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
        self.graphs.manager.count_replay(batch)
        self.over, self.outputs = True, None
        return outputs

    def drop(self) -> None:
        """Counts a replay that is not settled as a misprediction."""
        if self.outputs is not None:
            self.graphs.manager.count_misprediction()
        self.over, self.outputs = True, None


def begin(
    tower: Tower, pixels: torch.Tensor, grid: torch.Tensor | Read, graphs: Graphs, made: int, look: bool
) -> Guess:
    """Enqueues a replay where `grid` tells the batch: by its shape, if it is `[n, 3]` on the tower's device, or itself.

    Until the replay is launched the GPU has nothing to do: what can wait for that does.

    Args:
        pixels: `[tokens, patch_width]`, any float dtype, any device.
        grid: the tensor, unread, or what it holds.
        made: which making of the weights is the last.
        look: whether something will be read beside the replay.
    """
    mark = tower.weights.mark() if look else None
    if isinstance(grid, Read):
        budget = grid.budget
    elif grid.dtype in GRID_DTYPES and max(grid.stride()) <= MAX_ROWS:
        budget = _likely(graphs, pixels.shape[0], grid.shape[0], tower.spec.merge_unit)
    else:
        budget = None
    outputs = None if budget is None else _replay(tower, graphs, budget, pixels, grid)
    return Guess(tower, graphs, made, mark, budget, outputs)


def begun(
    guess: Guess | None,
    tower: Tower,
    pixels: torch.Tensor,
    grid: torch.Tensor | Sequence[Item],
    graphs: Graphs | None,
    made: int,
    watching: bool,
) -> tuple[Guess | None, Mark | None, int]:
    """The guess, if it stands on these graphs, or another; None without graphs. See `begin`.

    Args:
        watching: whether the weights will be looked at.

    Returns:
        It; from where to look, if one will; which making of the weights was the last then.
    """
    look = watching or isinstance(grid, torch.Tensor)
    if graphs is None:
        return None, tower.weights.mark() if look else None, made
    if guess is None or guess.graphs is not graphs or guess.over:
        found = grid if isinstance(grid, torch.Tensor) else _read_of(tuple(grid), pixels.shape[0], graphs, tower)
        guess = begin(tower, pixels, found, graphs, made, look)
    return guess, guess.mark, guess.made


def settled(
    guess: Guess | None,
    tower: Tower,
    begin: Mark | None,
    grid: torch.Tensor | list[Item],
    rows: int,
    watching: bool,
) -> tuple[EncoderOutputs | None, list[Item], bool, bool | None]:
    """What the guess comes to once its grid is read; it is over then.

    Args:
        begin: from where to look at weights and grid.
        grid: `[n, 3]` on the tower's device, or items, for which nothing is looked at here.
        rows: patch tokens of the call.

    Returns:
        The outputs, if the guess stands; the items; whether the parameters held at `begin` what they did; whether the
        tower is what it was, None where nothing was launched under which to walk over it.

    Raises:
        ValueError: the grid is not one of this call.
    """
    same, true = True, None
    try:
        if isinstance(grid, torch.Tensor):
            walk = tower.weights.true if guess is not None and guess.outputs is not None else None
            same, found, true = tower.weights.look(begin, watching, grid).done(walk)
            grid = check_items(found, rows, tower.spec.merge_size)
        return None if guess is None else guess.settle(grid), grid, same, true
    finally:
        if guess is not None:
            guess.drop()


def _replay(
    tower: Tower, graphs: Graphs, budget: int, pixels: torch.Tensor, grid: torch.Tensor | Read
) -> EncoderOutputs | None:
    """Replays the graph of `budget`; None where there is none."""
    program, found = graphs.program, None

    def load(budget: int) -> None:
        program.load_inputs(budget, program.table(grid.items) if isinstance(grid, Read) else grid, pixels)

    def unload(budget: int) -> None:
        nonlocal found
        found = new_outputs(tower, pixels.shape[0])
        program.store_outputs(budget, found)

    graphs.manager.replay_if_captured(budget, load, unload)
    return found


def begin_again(
    last: Guess | None, graphs: Graphs | None, pixels: object, grid: object, made: int, watch: bool
) -> Guess | None:
    """`begin`, before anything is known of a call, on what the `last` one ran on; None where that is gone.

    Whatever speaks against the call is found while the replay runs, which is dropped then: its buffers are ours alone.
    """
    if last is None or last.graphs is not graphs or not _are_plain(pixels, last.tower):
        return None
    assert isinstance(pixels, torch.Tensor)
    if type(grid) is torch.Tensor and grid.device == last.tower.device:
        return begin(last.tower, pixels, grid, graphs, made, True) if grid.shape[1:] == (3,) else None
    read = _read(grid, pixels.shape[0], last)
    return None if read is None else begin(last.tower, pixels, read, graphs, made, watch)


def _read(grid: object, rows: int, last: Guess) -> Read | None:
    """What a grid on the host holds; None where anything about it is amiss, which is told of in its turn."""
    known = last.graphs.read
    try:
        key = _key(grid)
        found = known.get(key)
        if found is None:
            table = check_grid(grid)  # type: ignore[arg-type]  # it looks for itself
            items = tuple(check_items(table.tolist(), rows, last.tower.spec.merge_size))
            if len(known) >= LAYOUTS_KEPT:
                known.clear()
            found = known[key] = _read_of(items, rows, last.graphs, last.tower)
    except (TypeError, ValueError):
        return None
    return found if found.rows == rows else None


def _read_of(items: tuple[Item, ...], rows: int, graphs: Graphs, tower: Tower) -> Read:
    batch = _sole_batch(items, graphs, tower.spec.merge_unit)
    return Read(rows, items, None if batch is None else batch.budget)


def _key(grid: object) -> object:
    """What a grid on the host holds, in a word: 32 items are read and checked in 20 us, and looked up in 3.

    Raises:
        TypeError: it is on a GPU, or nothing ordinary.
    """
    if type(grid) is torch.Tensor and grid.is_cpu:
        return grid.dtype, grid.shape, grid.numpy().tobytes()
    if type(grid) is list and all([type(row) in (list, tuple) for row in grid]):
        return tuple(map(tuple, grid))
    raise TypeError("nothing to look up by")


def _are_plain(pixels: object, tower: Tower) -> bool:
    """Whether these are a tensor of the right shape on the tower's GPU, and nothing acts on what is done to it.

    A subclass may, and so may what traces, captures or differentiates.
    """
    if type(pixels) is not torch.Tensor or pixels.device != tower.device or pixels.requires_grad:
        return False
    shape = pixels.shape
    return (
        len(shape) == 2
        and shape[1] == tower.spec.patch_width
        and pixels.dtype.is_floating_point
        and is_current(tower.device)
        and not torch._C._is_tracing()
    )


def _likely(graphs: Graphs, rows: int, items: int, unit: int) -> int | None:
    """The budget of the one batch that `items` of together `rows` patch tokens make: as last time, or as any would."""
    budget = graphs.guesses.get((rows, items), _UNKNOWN)
    if budget != _UNKNOWN:
        return budget
    return None if rows % unit else sole_budget(rows // unit, items, graphs.limits)


def _sole_batch(items: Sequence[Item], graphs: Graphs, unit: int) -> Batch | None:
    """The batch that `items` are, if that is one, of every item whole and in order: what `kernels.load_inputs` lets pass."""
    steps = steps_of(graphs, tuple(items), unit)
    alone = len(steps) == 1 and len(steps[0].runs) == 1 and len(steps[0].rows) == len(items)
    return steps[0].batch if alone else None
