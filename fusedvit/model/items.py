"""An image or a video in numbers: what `grid_thw` says of it."""

from typing import NamedTuple


class Item(NamedTuple):
    """One image (t = 1) or video, in patches. A tuple: a call makes and hashes one per item."""

    t: int
    h: int
    w: int

    @property
    def tokens(self) -> int:
        """Patch tokens."""
        return self.t * self.h * self.w

    def tiles(self, block_m: int) -> int:
        """Attention query tiles of `block_m` tokens, whole ones per frame."""
        return self.t * -(-(self.h * self.w) // block_m)

    def windows(self, side: int) -> int:
        """Attention windows of `side` x `side` patches, cut at the border, whole ones per frame."""
        return self.t * -(-self.h // side) * -(-self.w // side)

    def window_tiles(self, side: int, block_m: int) -> int:
        """Attention query tiles of `block_m` tokens, whole ones per window."""
        rows, cols = (((n // side, side), (1, n % side)) for n in (self.h, self.w))
        return self.t * sum(a * b * -(-(h * w) // block_m) for a, h in rows for b, w in cols)
