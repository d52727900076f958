"""How much work an item is, for balancing items over GPUs.

A frame of p patches costs linear layers work in proportion to p, and attention in proportion to p² (attention stays
within a frame). Counted in multiply-adds of one block:

    linear     p · (4 h² + m h i)     q, k, v and the output projection; m matrices of h × i in the MLP
    attention  p² · 2 h               q kᵀ and p v

Divided by 2 h the cost is p · (p + constant), with constant = 2 h + m i / 2. That is 6608 for Qwen3-VL-8B's tower
(h 1152, i 4304, m 2): in a frame of 6608 patches attention costs as much as the linear layers. Left out are the patch
embedding and the mergers (a tenth of that tower's linear layers), windows of attention, and the speed of each kernel.
"""

from collections.abc import Iterable


def patch_constant(hidden_size: int, intermediate_size: int, mlp_matrices: int = 2) -> float:
    """The work of a patch in linear layers, in units of the attention work of a pair of patches.

    Args:
        hidden_size: channels of the tower, and of all its attention heads together.
        intermediate_size: channels within the MLP.
        mlp_matrices: 2, or 3 where the MLP is gated.
    """
    return 2 * hidden_size + mlp_matrices * intermediate_size / 2


def load(frames: Iterable[tuple[int, int]], constant: float) -> float:
    """Σ frames · p · (p + constant): relative work, which compares calls of one tower.

    Args:
        frames: pairs (frames, patches of each, before the spatial merge), one an image or video.
        constant: `patch_constant` of the tower.
    """
    return sum(count * patches * (patches + constant) for count, patches in frames)
