"""Options of `fusedvit.fuse`."""

from collections.abc import Sequence
from dataclasses import dataclass

from fusedvit.graphs.limits import check_limits

ANY_BUDGET = 2**31  # stands for budgets that are inferred later


@dataclass(frozen=True)
class FuseConfig:
    """How a fused tower behaves.

    Options that cannot be met by any tower are refused here: ValueError or TypeError, by the option's name.

    Attributes:
        token_budgets: output (merged) tokens that captured graphs have room for, ascending; the last decides what
            memory is held. At least four sizes an octave below it are added: a small batch runs on tiles of its own
            size. Inferred from the tower and free memory if None.
        max_items: images + videos (or parts of videos) that a graph holds; inferred if None.
        max_frames: frames (attention sequences) that a graph holds; inferred if None.
        graphs: replay CUDA graphs on a GPU; without them every call runs eagerly.
        strict: raise `RuntimeError` where a call would fall back to the original code.
        watch_data: notice writes that bypass autograd's version counter (`param.data.copy_(...)`) by a sampled
            fingerprint, read together with `grid_thw`. Without it such writes need `handle.refresh()`.
    """

    token_budgets: Sequence[int] | None = None
    max_items: int | None = None
    max_frames: int | None = None
    graphs: bool = True
    strict: bool = False
    watch_data: bool = True

    def __post_init__(self) -> None:
        items = 1 if self.max_items is None else self.max_items
        frames = items if self.max_frames is None else self.max_frames
        check_limits((ANY_BUDGET,) if self.token_budgets is None else self.token_budgets, items, frames)
