"""Reference of `kernels.patches`."""

import torch
from einops import rearrange

from fusedvit.kernels.patches import PatchLayout, Taps


def patches_from_images(
    images: torch.Tensor,
    down: Taps | None,
    across: Taps | None,
    layout: PatchLayout,
    grid: tuple[int, int, int],
    out: torch.Tensor,
    down_first: bool = False,
) -> torch.Tensor:
    """See `fusedvit.kernels.patches.patches_from_images`."""
    t, h, w = grid
    for taps, axis in ((down, 1), (across, 2)) if down_first else ((across, 2), (down, 1)):
        images = images if taps is None else _resize(images, taps, axis)
    missing = t * layout.temporal - images.shape[0]
    images = torch.cat([images, images[-1:].expand(missing, -1, -1, -1)])
    whole = images.new_zeros(images.shape[0], h * layout.patch, w * layout.patch, images.shape[3])
    whole[:, : images.shape[1], : images.shape[2]] = images
    sides = {"tp": layout.temporal, "mh": layout.merge, "mw": layout.merge, "ph": layout.patch, "pw": layout.patch}
    pattern = "(t tp) (h mh ph) (w mw pw) c -> (t h w mh mw) (c tp ph pw)"
    return out.copy_(rearrange(whole, pattern, **sides))


def _resize(images: torch.Tensor, taps: Taps, axis: int) -> torch.Tensor:
    """`images` `[n, H, W, C]` resized along axis 1 or 2, rounded to bytes."""
    length = images.shape[axis]
    shape = [1, -1, 1, 1] if axis == 1 else [1, 1, -1, 1]
    total = torch.tensor(1 << (taps.bits - 1), dtype=torch.int32, device=images.device)
    for t, weights in enumerate(taps.weights):
        at = (taps.first + t).clamp(max=length - 1)
        total = total + images.index_select(axis, at).int() * weights.view(shape)
    return (total >> taps.bits).clamp(0, 255).byte()
