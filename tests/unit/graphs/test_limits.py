"""Limits: what a user may ask for, and what is inferred where he asks for nothing."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedvit.graphs.limits import Limits, check_limits, infer_limits

GIB = 2**30
DENSE = range(128, 512, 16)
TO_16K = tuple(sorted({*(n << i for i in range(4, 12) for n in (4, 5, 6, 7)), *DENSE, 16384}))
ROOMY = {"smallest": 64, "largest": 16384, "dense": DENSE}
ROOMY |= {"bytes_per_token": 2**17, "free_bytes": 100 * GIB, "share": 0.1}


def test_accepts_what_holds():
    assert check_limits([64, 256], 64, 64) == Limits((64, 256), 64, 64)
    assert check_limits((1,), 1, 1) == Limits((1,), 1, 1)


@pytest.mark.parametrize(
    ("budgets", "items", "frames", "error", "message"),
    [
        ((), 1, 1, ValueError, "token_budgets must name at least one budget, got none"),
        ("64", 1, 1, TypeError, "token_budgets must be a sequence of ints, got str"),
        ({64, 256}, 1, 1, TypeError, "token_budgets must be a sequence of ints, got set"),
        (256, 1, 1, TypeError, "token_budgets must be a sequence of ints, got int"),
        ((64, 256.0), 1, 1, TypeError, r"token_budgets\[1\] must be an int, got float"),
        ((True,), 1, 1, TypeError, r"token_budgets\[0\] must be an int, got bool"),
        ((0, 64), 1, 1, ValueError, r"token_budgets\[0\] must be at least 1, got 0"),
        ((64, -256), 1, 1, ValueError, r"token_budgets\[1\] must be at least 1, got -256"),
        ((256, 64), 1, 1, ValueError, "token_budgets must ascend, each budget once; got 256 before 64"),
        ((64, 64), 1, 1, ValueError, "token_budgets must ascend, each budget once; got 64 before 64"),
        ((64,), 0, 1, ValueError, "max_items must be at least 1, got 0"),
        ((64,), 1.0, 1, TypeError, "max_items must be an int, got float"),
        ((64,), 1, None, TypeError, "max_frames must be an int, got NoneType"),
        ((64,), 1, True, TypeError, "max_frames must be an int, got bool"),
        ((16, 64), 65, 65, ValueError, "max_items must be at most the largest of token_budgets, 64, .* got 65"),
        ((64,), 8, 7, ValueError, "max_frames must be at least max_items, 8, .* got 7"),
    ],
)
def test_names_the_option_that_is_wrong(budgets, items, frames, error, message):
    with pytest.raises(error, match=message):
        check_limits(budgets, items, frames)


@given(budgets=st.sets(st.integers(1, 500), min_size=1, max_size=8), tokens=st.integers(0, 600))
def test_smallest_budget_that_holds(budgets, tokens):
    limits = Limits(tuple(sorted(budgets)), 1, 1)
    assert limits.smallest_for(tokens) == min((b for b in budgets if b >= tokens), default=None)
    assert limits.largest == max(budgets)


def test_defaults_with_room():
    assert infer_limits(**ROOMY) == Limits(TO_16K, 64, 256)


def test_a_default_video_fits_one_batch():
    limits = infer_limits(**ROOMY)
    frames, frame_tokens = 32, 196  # 64 pictures of 448 pixels
    assert frames <= limits.max_frames and frames * frame_tokens <= limits.largest


@pytest.mark.parametrize(
    ("free_gib", "largest"),
    [(21, 16384), (16, 8192), (7, 4096), (1.5, 1024), (0.1, 64), (0, 64)],  # the last two do not even hold 64
)
def test_ladder_ends_at_what_memory_holds(free_gib, largest):
    limits = infer_limits(**ROOMY | {"free_bytes": int(free_gib * GIB)})
    assert limits.token_budgets == tuple(b for b in TO_16K if b <= largest)


@pytest.mark.parametrize(
    ("smallest", "largest", "budgets"),
    [
        (64, 64, (64,)),
        (64, 100, (64, 80, 96, 100)),
        (49, 200, (49, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 200)),
        (1, 12, (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)),
        (3, 5, (3, 4, 5)),
        (224, 640, (*range(224, 512, 16), 512, 640)),
        (448, 1100, (448, 464, 480, 496, 512, 640, 768, 896, 1024, 1100)),
    ],
)
def test_four_sizes_an_octave_and_the_dense_ones_lie_between_the_ends(smallest, largest, budgets):
    assert infer_limits(**ROOMY | {"smallest": smallest, "largest": largest}).token_budgets == budgets


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"token_budgets": [100, 300]}, Limits((64, 80, 96, 100, 112, *range(128, 300, 16), 300), 64, 256)),
        ({"token_budgets": (16,)}, Limits((16,), 16, 16)),
        ({"token_budgets": (64,)}, Limits((64,), 64, 64)),
        ({"token_budgets": (16, 64)}, Limits((16, 64), 64, 64)),
        ({"max_items": 200}, Limits(TO_16K, 200, 800)),
        ({"max_items": 1}, Limits(TO_16K, 1, 256)),
        ({"max_frames": 10}, Limits(TO_16K, 10, 10)),
        # room for the items asked for
        ({"max_items": 100, "free_bytes": 0}, Limits((64, 80, 96, 100), 100, 100)),
    ],
)
def test_keeps_what_the_user_gave(given, expected):
    assert infer_limits(**ROOMY | given) == expected


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"token_budgets": ()}, ValueError, "token_budgets"),
        ({"max_items": "8"}, TypeError, "max_items must be an int, got str"),
        ({"max_frames": 0}, ValueError, "max_frames must be at least 1, got 0"),
        ({"max_items": 8, "max_frames": 4}, ValueError, "max_frames must be at least max_items"),
        ({"max_items": 20000}, ValueError, "max_items must be at most the largest of token_budgets, 16384"),
    ],
)
def test_inference_names_what_is_wrong(given, error, message):
    with pytest.raises(error, match=message):
        infer_limits(**ROOMY | given)


@given(
    smallest=st.integers(1, 300),
    factor=st.integers(1, 4000),
    dense=st.builds(range, st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 300)),
    free=st.integers(0, 2**38),
    bytes_per_token=st.integers(1, 2**20),
    share=st.floats(0.01, 1),
)
@settings(deadline=None)
def test_inferred_limits_hold(smallest, factor, dense, free, bytes_per_token, share):
    largest = smallest * factor
    limits = infer_limits(
        smallest=smallest,
        largest=largest,
        dense=dense,
        bytes_per_token=bytes_per_token,
        free_bytes=free,
        share=share,
    )
    assert limits == check_limits(limits.token_budgets, limits.max_items, limits.max_frames)
    assert smallest == limits.token_budgets[0] and limits.largest <= largest
    assert all(4 * b <= 5 * a or b == a + 1 for a, b in pairwise(limits.token_budgets)), "a batch fills four fifths"
    assert limits.largest == smallest or limits.largest * bytes_per_token <= share * free
