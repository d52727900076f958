"""The attention kernel and its reference against softmax written out, and what must not leak between segments."""

import dataclasses
from typing import Any

import pytest
import torch

from fusedvit.kernels.attention import attention
from fusedvit.kernels.reference.attention import attention as attention_ref
from fusedvit.kernels.tile_configs import AttentionConfig, split_head
from tests.kernels.attention_cases import HEADS, packed, plain, run, segments, with_room
from tests.kernels.support import NAN, assert_within

# The interpreter's numpy says so when it meets the NaN planted here.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|All-NaN):RuntimeWarning")

DTYPES = (torch.float32, torch.float16)
HEAD_DIMS = (64, 72, 80, 96, 128)  # whole; 64 + 16 with 8 columns to spare; 64 + 16; 64 + 32; whole
CONFIG = AttentionConfig(16, 32, 4, 2, max_programs=5)  # fewer programs than work: the persistent loop turns
OTHER = AttentionConfig(32, 16, 4, 2, max_programs=5)  # more queries than keys a step

LENGTHS = {
    "one merged token": [4],
    "one token": [1],
    "frames of one merged token": [4] * 9,
    "a block of keys exactly": [32],
    "two blocks exactly": [64],
    "one key past a block": [33],
    "one query past a tile, short of a block": [17],
    "ragged": [20, 4, 51, 32, 1, 7],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_reference_is_the_formula(head_dim: int, lengths: list[int], device: torch.device) -> None:
    qkv = packed(lengths, head_dim, torch.float64, device)
    out = run(attention_ref, with_room(qkv, 3), segments(lengths, 16, device, room=2), head_dim, CONFIG)
    torch.testing.assert_close(out[:-3], plain(qkv, lengths, head_dim, torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_kernel_is_within_the_rule(head_dim: int, lengths: list[int], dtype: torch.dtype, device: torch.device) -> None:
    config = CONFIG if head_dim != 80 else OTHER
    qkv = packed(lengths, head_dim, dtype, device)
    segs = segments(lengths, config.block_m, device, room=2)
    out = run(attention, with_room(qkv, 5), segs, head_dim, config)[: qkv.shape[0]]
    ref = plain(qkv, lengths, head_dim, torch.float64)
    assert_within(out, ref, plain(qkv, lengths, head_dim, dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_head_in_two_products(head_dim: int, device: torch.device) -> None:
    """As fp32 takes wide heads: 128 = 64 + 64, 64 = 32 + 32."""
    config = dataclasses.replace(CONFIG, max_head=head_dim // 2)
    lengths = [20, 4, 33]
    qkv = packed(lengths, head_dim, torch.float32, device)
    out = run(attention, with_room(qkv, 5), segments(lengths, 16, device), head_dim, config)[:-5]
    assert_within(out, plain(qkv, lengths, head_dim, torch.float64), plain(qkv, lengths, head_dim, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_without_a_copy_engine(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Descriptors made in the kernel read the same."""
    if device.type == "cuda":
        pytest.skip("such devices are older than the GPU here")
    lengths = LENGTHS["ragged"]
    qkv = with_room(packed(lengths, head_dim, dtype, device), 5)
    segs = segments(lengths, 16, device, room=2)
    expected = run(attention, qkv, segs, head_dim, CONFIG)
    out = run(attention, qkv, segs, head_dim, dataclasses.replace(CONFIG, copy_engine=False))
    assert torch.equal(out[:-5], expected[:-5]) and out[-5:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [attention, attention_ref], ids=["kernel", "reference"])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_output_within_bounds(head_dim: int, op: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit the output without bounds, clamped; NaN stays."""
    lengths = LENGTHS["ragged"]
    qkv, clip = packed(lengths, head_dim, dtype, device), torch.tensor([-0.25, 0.125], device=device)
    qkv[:20] = NAN
    segs = segments(lengths, CONFIG.block_m, device, room=2)
    free, held = (run(op, with_room(qkv, 5), segs, head_dim, CONFIG, bounds) for bounds in (None, clip))
    assert free[20:-5].min() < -0.25 and free[20:-5].max() > 0.125
    torch.testing.assert_close(held, free.clamp(-0.25, 0.125), rtol=0, atol=0, equal_nan=True)
    assert held[:20].isnan().all() and held[-5:].isnan().all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nan_stays_in_its_segment(head_dim: int, device: torch.device) -> None:
    """Tiles read up to a block past a segment's end, and a head's tail past its columns."""
    lengths = [5, 20, 9, 33, 6]  # none a multiple of a block
    qkv = packed(lengths, head_dim, torch.float32, device)
    segs = segments(lengths, CONFIG.block_m, device)
    clean = run(attention, qkv, segs, head_dim, CONFIG)
    poisoned = qkv.clone()
    kept = torch.zeros(sum(lengths), dtype=torch.bool, device=device)
    kept[5:25] = kept[34:67] = True  # the second and the fourth
    poisoned[~kept] = NAN
    out = run(attention, with_room(poisoned, 40), segs, head_dim, CONFIG)
    assert torch.equal(out[: len(kept)][kept], clean[kept])
    assert out[: len(kept)][~kept].isnan().all(), "NaN in, something else out"


@pytest.mark.parametrize("head_dim", [64, 72])
def test_a_segment_gives_the_same_bits_anywhere(head_dim: int, device: torch.device) -> None:
    """The same frames in another order: each bit for bit as before."""
    lengths = [20, 4, 33]
    qkv = packed(lengths, head_dim, torch.float32, device)
    out = run(attention, qkv, segments(lengths, 16, device), head_dim, CONFIG)
    turned = torch.cat([*reversed(qkv.split(lengths))])
    back = run(attention, turned, segments(lengths[::-1], 16, device), head_dim, CONFIG)
    assert torch.equal(torch.cat([*reversed(back.split(lengths[::-1]))]), out)


def test_tiles_past_the_count_do_not_run(device: torch.device) -> None:
    lengths = [20, 12]
    qkv = packed(lengths, 72, torch.float32, device)
    exact = run(attention, qkv, segments(lengths, 16, device), 72, CONFIG)
    roomy = run(attention, qkv, segments(lengths, 16, device, room=7), 72, CONFIG)
    assert torch.equal(roomy, exact)


def test_no_tiles_write_nothing(device: torch.device) -> None:
    qkv = packed([8], 64, torch.float32, device)
    for room in (0, 3):
        segs = segments([], 16, device, room=room)
        assert run(attention, qkv, segs, 64, CONFIG).isnan().all()


def test_rows_past_the_last_segment_are_left(device: torch.device) -> None:
    lengths = [20]
    qkv = packed(lengths, 80, torch.float32, device)
    out = run(attention, with_room(qkv, 20), segments(lengths, 16, device), 80, CONFIG)
    assert out[:20].isfinite().all() and out[20:].isnan().all()


def test_split_head() -> None:
    parts = {64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 128: (128, 0)}
    assert {head_dim: split_head(head_dim) for head_dim in HEAD_DIMS} == parts
    assert [split_head(head_dim, 64) for head_dim in (64, 72, 96, 128)] == [(64, 0), (64, 16), (64, 32), (64, 64)]
    with pytest.raises(AssertionError, match="a head of 160"):
        split_head(160, 64)


def test_mismatch_says_what_came(device: torch.device) -> None:
    qkv = packed([8], 64, torch.float32, device)
    with pytest.raises(AssertionError, match="expected tiles of 16 queries, got 32"):
        run(attention, qkv, segments([8], 32, device), 64, CONFIG)
    with pytest.raises(AssertionError, match="contiguous"):
        out = torch.empty(8, 2 * HEADS * 64, device=device)[:, ::2]
        attention(qkv, segments([8], 16, device), out, HEADS, 64, CONFIG)
