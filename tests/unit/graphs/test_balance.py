"""The formula of work against a count of multiply-adds, block by block."""

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusedvit.graphs.balance import balance, patch_constant, work
from fusedvit.graphs.packing import ItemSize, Piece


def multiply_adds(patches: int, hidden: int, intermediate: int, mlp_matrices: int) -> int:
    qkv, projection = patches * hidden * 3 * hidden, patches * hidden * hidden
    mlp = mlp_matrices * patches * hidden * intermediate
    scores, values = patches * patches * hidden, patches * patches * hidden
    return qkv + projection + mlp + scores + values


@pytest.mark.parametrize(("hidden", "intermediate", "mlp_matrices"), [(1152, 4304, 2), (1280, 3420, 3)])
@pytest.mark.parametrize("patches", [4, 784, 16384])
def test_work_is_proportional_to_the_multiply_adds_of_a_block(hidden, intermediate, mlp_matrices, patches):
    constant = patch_constant(hidden, intermediate, mlp_matrices)
    assert 2 * hidden * work([(1, patches)], constant) == multiply_adds(patches, hidden, intermediate, mlp_matrices)


def test_work_adds_up_over_frames_and_items():
    assert work([], 10.0) == 0
    assert work([(3, 4), (1, 5)], 10.0) == 3 * 4 * 14 + 5 * 15
    assert work([(1, 8)], 10.0) > work([(2, 4)], 10.0), "one frame of all patches attends to more"


def test_qwen3_vl_8b():
    assert patch_constant(1152, 4304) == 6608


sizes = st.lists(st.builds(ItemSize, st.integers(0, 70), st.integers(0, 300)), max_size=12)


# A part is overfilled by half a frame.
OVERFILLED = [ItemSize(9, 209), ItemSize(13, 91), ItemSize(23, 123), ItemSize(26, 92), ItemSize(36, 60)]


@given(sizes, st.integers(1, 5))
@example(OVERFILLED, 4)
def test_balance_gives_every_frame_to_one_part(items, parts):
    shares = balance(items, parts, 100.0)
    assert shares == balance(items, parts, 100.0) and len(shares) == parts
    frames = Counter(
        (p.item, f) for share in shares for p in share for f in range(p.first_frame, p.first_frame + p.frames)
    )
    assert frames == Counter((i, f) for i, size in enumerate(items) if all(size) for f in range(size.frames))
    assert all(list(share) == sorted(share) for share in shares)
    assert all(p.tokens == p.frames * items[p.item].frame_tokens for share in shares for p in share)


@given(sizes, st.integers(1, 5))
def test_no_part_is_above_the_mean_by_more_than_a_frame(items, parts):
    """Nor, where a part holds images alone, above the mean by more than an image."""
    loads = [
        sum(work([(p.frames, items[p.item].frame_tokens)], 100.0) for p in share)
        for share in balance(items, parts, 100.0)
    ]
    frame = max([work([(1, size.frame_tokens)], 100.0) for size in items if all(size)], default=0)
    assert max(loads) <= sum(loads) / parts + frame + 1e-6


def test_one_video_over_two_parts():
    assert balance([ItemSize(64, 784)], 2, 6608.0) == ((Piece(0, 0, 32, 32 * 784),), (Piece(0, 32, 32, 32 * 784),))
    with pytest.raises(ValueError, match="at least 1"):
        balance([], 0, 1.0)
