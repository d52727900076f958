"""Balances items over GPUs by an estimate of their work.

For a frame of p patches the work of linear layers is proportional to p, and that of attention to p² (attention stays
within a frame). In multiply-adds of one block:

    linear     p · (4 h² + m h i)     q, k, v and the output projection; m matrices of h × i in the MLP
    attention  p² · 2 h               q kᵀ and p v

Divided by 2 h the cost is p · (p + constant), with constant = 2 h + m i / 2. That is 6608 for Qwen3-VL-8B's tower
(h 1152, i 4304, m 2): in a frame of 6608 patches attention costs as much as the linear layers. The estimate leaves out
the patch embedding and the mergers (a tenth of that tower's linear layers), attention windows, and kernel speeds.
"""

from collections.abc import Iterable, Sequence

from fusedvit.graphs.packing import ItemSize, Piece


def patch_constant(hidden_size: int, intermediate_size: int, mlp_matrices: int = 2) -> float:
    """The work of a patch in linear layers, in units of the attention work of a pair of patches.

    Args:
        hidden_size: channels of the residual stream, which is also the width of all attention heads together.
        intermediate_size: channels of the MLP's hidden layer.
        mlp_matrices: 2, or 3 where the MLP is gated.
    """
    return 2 * hidden_size + mlp_matrices * intermediate_size / 2


def work(frames: Iterable[tuple[int, int]], constant: float) -> float:
    """Σ frames · p · (p + constant): relative work, to compare calls of one tower.

    Args:
        frames: a pair (frames, patches of each frame before the spatial merge) for each image or video.
        constant: `patch_constant` of the tower.
    """
    return sum(count * patches * (patches + constant) for count, patches in frames)


def balance(sizes: Sequence[ItemSize], parts: int, constant: float) -> tuple[tuple[Piece, ...], ...]:
    """Divides items over `parts` GPUs so that the largest share of the load is small; deterministic.

    Each image, largest first, goes to the part with the least load. Then videos fill the parts up to a common level,
    and are cut between frames where a part is full. Attention never crosses frames, so a cut changes no bit.

    Args:
        sizes: of the items; `frame_tokens` counts patches here. Items without patches appear in no part.
        parts: at least 1.
        constant: `patch_constant` of the tower.

    Returns:
        The pieces of each part, in the caller's order; together they hold every frame of every item once.

    Raises:
        ValueError: `parts` is not positive.
    """
    if parts < 1:
        raise ValueError(f"items are balanced over at least 1 GPU, got {parts}")
    shares: list[list[Piece]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    by_load = sorted((-work([size], constant), item) for item, size in enumerate(sizes) if all(size))
    for negative, item in by_load:
        if sizes[item].frames == 1:
            least = loads.index(min(loads))
            loads[least] -= negative
            shares[least].append(Piece(item, 0, 1, sizes[item].frame_tokens))
    _pour([(item, sizes[item]) for _, item in by_load if sizes[item].frames > 1], shares, loads, constant)
    return tuple(tuple(sorted(share)) for share in shares)


def _pour(
    videos: Iterable[tuple[int, ItemSize]], shares: list[list[Piece]], loads: list[float], constant: float
) -> None:
    """Adds videos to `shares`, least loaded first, each up to the level at which all filled shares end equal."""
    queue = [(item, size, 0) for item, size in reversed(list(videos))]  # with the first frame not yet placed
    left = sum(work([size], constant) for _, size, _ in queue)
    order = sorted(range(len(loads)), key=loads.__getitem__)
    for i, part in enumerate(order):
        room = _level(left, [loads[other] for other in order[i:]]) - loads[part]
        while queue:
            item, size, first = queue.pop()
            one = work([ItemSize(1, size.frame_tokens)], constant)
            rest = size.frames - first
            fitting = max(0, round(room / one))  # an earlier video, rounded up, may have overfilled the part
            frames = rest if i == len(order) - 1 else min(rest, fitting)
            if frames:
                shares[part].append(Piece(item, first, frames, frames * size.frame_tokens))
                room, left = room - frames * one, left - frames * one
            if frames < rest:
                queue.append((item, size, first + frames))
                break


def _level(poured: float, loads: Sequence[float]) -> float:
    """The level reached when `poured` is spread over the lowest of `loads` (ascending) so that these end equal."""
    below = 0.0
    for count, load_of in enumerate(loads, 1):
        below += load_of
        level = (poured + below) / count
        if count == len(loads) or level <= loads[count]:
            return level
    return poured
