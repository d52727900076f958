"""An image or a video as a row of `grid_thw`."""

from typing import NamedTuple


class Item(NamedTuple):
    """One image (t = 1) or video, in patches. It is a tuple because each call creates and hashes one per item."""

    t: int
    h: int
    w: int

    @property
    def tokens(self) -> int:
        """Patch tokens."""
        return self.t * self.h * self.w

    def tiles(self, block_m: int) -> int:
        """Attention query tiles of `block_m` tokens; each frame takes whole tiles."""
        return self.t * -(-(self.h * self.w) // block_m)

    def windows(self, side: int) -> int:
        """Attention windows of `side` x `side` patches in all frames; windows at a frame's border may be smaller."""
        return self.t * -(-self.h // side) * -(-self.w // side)

    def window_tiles(self, side: int, block_m: int) -> int:
        """Attention query tiles of `block_m` tokens; each window takes whole tiles."""
        rows, cols = (((n // side, side), (1, n % side)) for n in (self.h, self.w))
        return self.t * sum(a * b * -(-(h * w) // block_m) for a, h in rows for b, w in cols)
