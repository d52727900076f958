"""Bytes for a tower, as processors would make them."""

from typing import Any

import torch

from fusedvit.model.normalization import Normalization
from fusedvit.pixels.byte_pixels import BytePixels
from tests.support.towers import Grid, patches_of

CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
KINDS = {"still": True, "frames": False}


def normalization_for(tower: Any, **numbers: Any) -> Normalization:
    c = tower.config
    layout = {"temporal_patch": getattr(c, "temporal_patch_size", 1), "channels": c.in_channels}
    return Normalization(**({"rescale_factor": 1 / 255, "patch": c.patch_size} | layout | CLIP | numbers))


def bytes_for(tower: Any, grid: Grid, still: bool, seed: int = 0, page: bool = False, **numbers: Any) -> BytePixels:
    """On the CPU; with a mean far from that of the normalisation, as bright images have. `page`: black on white."""
    n = normalization_for(tower, **numbers)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(patches_of(grid), n.width(still), generator=generator)
    rows = 255.0 * (rows < 1.6) if page else 180 + 25 * rows
    return BytePixels.mark(rows.clamp(0, 255).to(torch.uint8), n, still)
