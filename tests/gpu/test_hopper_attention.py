"""Attention for Hopper on the device, in every schedule that ships: the tolerance rule, repeats, NaN, overflow.

The quick ones (`-k quick`) take seconds beside the compilation of a dozen kernels, side by side.
"""

import random as pseudo_random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fusedvit.bench.ops import compiling_only
from fusedvit.kernels import backends
from fusedvit.kernels.hopper.attention_configs import (
    LONG,
    SHORT,
    HopperAttentionConfig,
    hopper_attention_candidates,
    schedules,
)
from fusedvit.kernels.tile_configs import Target
from fusedvit.model import ops
from fusedvit.tolerance import summarize
from tests.kernels import attention_cases
from tests.kernels.attention_cases import packed, segments, with_room
from tests.kernels.support import NAN, assert_within

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
HEADS = 16
REPEATS = 50
ROOM = 200  # rows of NaN past the last frame

RAGGED = {
    "around blocks and tiles": [1, 63, 64, 65, 127, 129, 200, 1000],
    "frames and windows": [196] * 12 + [64] * 20 + [4] * 20,
    "one long": [2500],
}


def shipped(head_dim: int, device: torch.device) -> list[HopperAttentionConfig]:
    """The schedules that the heuristic chooses from for such heads."""
    sms = Target.of(device).num_sms
    return [replace(config, max_programs=config.ctas * sms) for config in schedules(head_dim)]


@pytest.fixture(scope="module")
def backend(device: torch.device) -> backends.Backend:
    found = backends.backend_named(backends.ATTENTION, "hopper")
    reason = "no Gluon in this Triton" if found is None else found.absent(Target.of(device).capability, BF16)
    if found is None or reason:
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module", autouse=True)
def compiled(backend: backends.Backend, device: torch.device) -> None:
    """Every kernel of the quick tests, side by side."""
    with compiling_only():
        for head_dim in (72, 64, 80, 128):
            for dtype in (BF16, FP16) if head_dim == 72 else (BF16,):
                qkv = packed([64], head_dim, dtype, device, heads=HEADS)
                for config in shipped(head_dim, device):
                    attend(qkv, [64], head_dim, config)


def attend(qkv: torch.Tensor, lengths: list[int], head_dim: int, config: HopperAttentionConfig) -> torch.Tensor:
    """Through `backends`, as the encoder does; tiles past the count would overwrite the first rows."""
    segs = segments(lengths, config.block_m, qkv.device, room=5)
    return attention_cases.run(ops.attention, qkv, segs, head_dim, config)


def check(qkv: torch.Tensor, lengths: list[int], head_dim: int, config: HopperAttentionConfig, what: str) -> None:
    """The rule, with NaN past the last row, and every run's bits."""
    roomy, rows = with_room(qkv, ROOM), qkv.shape[0]
    first = attend(roomy, lengths, head_dim, config)
    assert first[rows:].isnan().all(), f"{what}: rows past the last frame were written"
    ref = attention_cases.plain(qkv, lengths, head_dim, torch.float64)
    assert_within(first[:rows], ref, attention_cases.plain(qkv, lengths, head_dim, qkv.dtype), f"{what}, {config}:")
    for _ in range(REPEATS):
        again = attend(roomy, lengths, head_dim, config)
        assert torch.equal(again[:rows], first[:rows]), f"{what}, {config}: other bits"


QUICK = [(72, BF16), (72, FP16), (64, BF16), (80, BF16), (128, BF16)]


@pytest.mark.parametrize("head_dim, dtype", QUICK, ids=str)
def test_quick_ragged(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    for config in shipped(head_dim, device):
        for what, lengths in RAGGED.items():
            check(packed(lengths, head_dim, dtype, device, heads=HEADS), lengths, head_dim, config, what)


def growing(qkv: torch.Tensor, head_dim: int) -> None:
    """Keys of the first 500 rows say nothing of those behind them: every exponent overflows."""
    qkv.view(len(qkv), 3, HEADS, head_dim)[500:, 1] *= 200.0


def creeping(qkv: torch.Tensor, head_dim: int) -> None:
    """Exponentials that fp16 cannot hold and bf16 can."""
    qkv.view(len(qkv), 3, HEADS, head_dim)[500:, 1] *= 6.0


def massive(qkv: torch.Tensor, head_dim: int) -> None:
    """Two channels of queries and keys thirty times the others, of either sign."""
    qkv.view(len(qkv), 3, HEADS, head_dim)[:, :2, :, [3, head_dim - 2]] *= 30.0


def sharp(qkv: torch.Tensor, head_dim: int) -> None:
    """Queries that see one key each."""
    qkv.view(len(qkv), 3, HEADS, head_dim)[:, 0] *= 8.0


@pytest.mark.parametrize("change", [growing, creeping, massive, sharp])
@pytest.mark.parametrize("head_dim, dtype", QUICK, ids=str)
def test_quick_magnitudes(
    head_dim: int, dtype: torch.dtype, change: Callable[[torch.Tensor, int], None], device: torch.device
) -> None:
    """Where softmax without a running maximum overflows, the tile is redone with one."""
    lengths = [900, 65, 130]
    qkv = packed(lengths, head_dim, dtype, device, heads=HEADS)
    change(qkv, head_dim)
    for config in shipped(head_dim, device):
        check(qkv, lengths, head_dim, config, change.__name__)


@pytest.mark.parametrize("value", [float("inf"), NAN])
@pytest.mark.parametrize("section", [1, 2], ids=["keys", "values"])
def test_quick_a_heads_infinities_stay_with_it(section: int, value: float, device: torch.device) -> None:
    """The box with the tail of a head of 72 holds the next head's first columns, too."""
    lengths, head_dim, broken = [300, 65], 72, 5
    qkv = packed(lengths, head_dim, BF16, device, heads=HEADS)
    wide, own = (attention_cases.plain(qkv, lengths, head_dim, dtype) for dtype in (torch.float64, BF16))
    qkv.view(len(qkv), 3, HEADS, head_dim)[:, section, broken, :8] = value
    others = [head for head in range(HEADS) if head != broken]
    for config in shipped(head_dim, device):
        ours = attend(qkv, lengths, head_dim, config)
        answers = (t.view(-1, HEADS, head_dim)[:, others] for t in (ours, wide, own))
        assert_within(*answers, f"{config}:")


@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_quick_nan_stays_in_its_frame(head_dim: int, device: torch.device) -> None:
    """Frames of NaN on both sides: bit for bit as beside real numbers."""
    lengths = [5, 300, 9, 196, 70, 64, 6]
    qkv = packed(lengths, head_dim, BF16, device, heads=HEADS)
    poisoned = qkv.clone()
    for frame in list(poisoned.split(lengths))[::2]:
        frame.fill_(NAN)
    for config in shipped(head_dim, device):
        clean = attend(qkv, lengths, head_dim, config).split(lengths)
        out = attend(with_room(poisoned, ROOM), lengths, head_dim, config)[:-ROOM].split(lengths)
        for i, frame in enumerate(out):
            assert frame.isnan().all() if i % 2 == 0 else torch.equal(frame, clean[i]), f"{config}, frame {i}"


def test_quick_nothing_to_do(device: torch.device) -> None:
    for config in shipped(72, device):
        qkv = packed([8], 72, BF16, device, heads=HEADS)
        assert attend(qkv, [], 72, config).isnan().all()


def test_quick_two_lists(device: torch.device) -> None:
    """Long frames in one launch, short ones in another: bit for bit what each frame is by itself, however many."""
    short, long = (replace(config, max_programs=132) for config in (SHORT, LONG))
    limit = 512
    for lengths in ([600, 196, 4, 512, 513, 64, 900], [196] * 9, [700, 800]):
        qkv = packed(lengths, 72, BF16, device, heads=HEADS)
        out = torch.full((len(qkv), HEADS * 72), NAN, dtype=BF16, device=device)
        ops.attention(qkv, segments(lengths, 192, device, 5, above=limit), out, HEADS, 72, long)
        ops.attention(qkv, segments(lengths, 128, device, 5, up_to=limit), out, HEADS, 72, short)
        for rows, frame in zip(qkv.split(lengths), out.split(lengths), strict=True):
            alone = attend(rows.contiguous(), [len(rows)], 72, short if len(rows) <= limit else long)
            assert torch.equal(frame, alone), f"{len(rows)} of {lengths}"


def test_quick_replayed_with_other_frames(device: torch.device) -> None:
    """Captured once, the frames and their count change on the device."""
    for config in shipped(72, device):
        qkv = packed([1500], 72, BF16, device, heads=HEADS)
        held = segments([1500], config.block_m, device, room=40)
        out = torch.full((1500, HEADS * 72), NAN, dtype=BF16, device=device)
        ops.attention(qkv, held, out, HEADS, 72, config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.attention(qkv, held, out, HEADS, 72, config)
        for lengths in ([300, 1, 64, 700], [1400], [196] * 6):
            fresh = segments(lengths, config.block_m, device)
            held.tiles.zero_()[: len(fresh.tiles)] = fresh.tiles
            held.num_tiles.copy_(fresh.num_tiles)
            graph.replay()
            rows = sum(lengths)
            assert torch.equal(out[:rows], attend(qkv, lengths, 72, config)[:rows]), f"{config}, {lengths}"


def test_quick_overlapped(device: torch.device) -> None:
    """A chain in which each launch reads what the last one wrote, begun before that has ended: the same bits.

    12 heads of 64 are q | k | v of 4; CTAs without work pass on what they waited for.
    """
    lengths = [196] * 3 + [700, 64]
    qkv = packed(lengths, 64, BF16, device, heads=12)
    for config in shipped(64, device):
        answers = []
        for pdl in (False, True):
            chosen = replace(config, pdl=pdl)
            segs = segments(lengths, config.block_m, device, room=40)
            wide = torch.zeros(len(qkv), 768, dtype=BF16, device=device)
            thin = torch.zeros(len(qkv), 256, dtype=BF16, device=device)

            def chain(wide=wide, thin=thin, segs=segs, chosen=chosen) -> None:
                for _ in range(10):
                    ops.attention(qkv, segs, wide, 12, 64, chosen)
                    ops.attention(wide, segs, thin, 4, 64, chosen)
                    wide.fill_(0.5)

            chain()
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain()
            for _ in range(20):
                thin.zero_()
                graph.replay()
                answers.append(thin.clone())
        assert answers[0].abs().sum() > 0
        assert all(torch.equal(answer, answers[0]) for answer in answers), config


@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_three_hundred_random_cases(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    rng, verdicts = pseudo_random.Random(head_dim), []
    for seed in range(300):
        config = rng.choice(shipped(head_dim, device))
        few = [rng.choice([1, 4, 63, 64, 65, 128, 192, 196, rng.randint(1, 1200)]) for _ in range(rng.randint(0, 9))]
        lengths = [*few, rng.randint(400, 900)]  # long enough for the rule's statistics to settle
        qkv = packed(lengths, head_dim, dtype, device, seed, heads=HEADS)
        out = attend(with_room(qkv, ROOM), lengths, head_dim, config)[: len(qkv)]
        ref = attention_cases.plain(qkv, lengths, head_dim, torch.float64)
        pt = attention_cases.plain(qkv, lengths, head_dim, dtype)
        verdicts.append(assert_within(out, ref, pt, f"{lengths}, {config}:"))
    print(f"attention for Hopper, heads of {head_dim}, {dtype}: {summarize(verdicts)}")


def test_every_candidate_is_right(device: torch.device) -> None:
    """What the tuner may come to choose, those that spill and are never chosen too."""
    lengths = RAGGED["around blocks and tiles"]
    for head_dim in (64, 72, 80, 128):
        qkv = packed(lengths, head_dim, BF16, device, heads=HEADS)
        for config in hopper_attention_candidates(head_dim, BF16, Target.of(device)):
            check(qkv, lengths, head_dim, config, "candidates")


def test_past_two_to_the_31(device: torch.device) -> None:
    """q | k | v of 2.2e9 elements: the last frames bit for bit as when computed alone."""
    frames, length = 3200, 196  # 621,379 rows of 3456 are 2^31
    qkv = packed([frames * length], 72, BF16, device, heads=HEADS)
    for config in (SHORT, LONG):
        whole = attend(qkv, [length] * frames, 72, config)
        tail = attend(qkv[-3 * length :].clone(), [length] * 3, 72, config)
        assert torch.equal(whole[-3 * length :], tail)
