"""Kernels on a GPU at the shapes of real towers, in the configurations that ship: the tolerance rule, bits that do not
change from run to run, and poison wherever nobody should look."""

import dataclasses
import itertools
import random as pseudo_random

import pytest
import torch
from triton import knobs

from fusedvit.kernels.attention import attention
from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.fingerprint import FingerprintSources, fingerprint
from fusedvit.kernels.linear import linear
from fusedvit.kernels.metadata import vision_metadata
from fusedvit.kernels.norms import layer_norm
from fusedvit.kernels.reference.fingerprint import fingerprint as fingerprint_ref
from fusedvit.kernels.reference.linear import linear as linear_ref
from fusedvit.kernels.reference.metadata import vision_metadata as vision_metadata_ref
from fusedvit.kernels.tile_configs import AttentionConfig, LinearConfig, Target, attention_config, budget, linear_config
from fusedvit.tolerance import summarize
from tests.kernels import attention_cases, linear_cases
from tests.kernels.attention_cases import packed, segments, with_room
from tests.kernels.linear_cases import Layer, fused, tensors
from tests.kernels.metadata_cases import assert_same_packed, fill, frames_of
from tests.kernels.support import NAN, assert_rounded_once, assert_within, count, random
from tests.kernels.test_metadata import assert_padding, assert_same

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
REPEATS = 20
ROWS = 1021  # prime: no multiple of a tile
MERGED = 253

LAYERS = {  # Qwen3-VL-8B's tower, then what others have that it has not
    "patch embed": Layer(ROWS, 1536, 1152, taps=True, stats=True),
    "qkv": Layer(ROWS, 1152, 3456, norm=True, part=128, heads=16),
    "proj": Layer(ROWS, 1152, 1152, residual=True, stats=True),
    "fc1": Layer(ROWS, 1152, 4304, norm=True, part=128, activation="gelu_tanh"),
    "fc2": Layer(ROWS, 4304, 1152, residual=True, stats=True),
    "fc2 in parts": Layer(MERGED, 4304, 1152, residual=True, stats=True),
    "merger fc1": Layer(MERGED, 4608, 4608, activation="gelu"),
    "deepstack fc1": Layer(MERGED, 4608, 4608, norm=True, merged=4, part=128, activation="gelu"),
    "merger fc2": Layer(MERGED, 4608, 4096),
    "qkv, heads of 64": Layer(ROWS, 1024, 3072, norm=True, part=128, heads=16),
    "qkv, heads of 80": Layer(ROWS, 1280, 3840, norm=True, part=64, heads=16),
    "massive channels": Layer(ROWS, 1152, 3456, norm=True, part=128, heads=16, massive=True),  # qkv's kernel
    "rows no multiple of 16 bytes": Layer(ROWS, 3420, 1280),
    "swiglu": Layer(ROWS, 1280, 6848, norm=True, rms=True, part=128, activation="swiglu"),
    "swiglu, clamped, a narrow tile more": Layer(MERGED, 1152, 2640, activation="swiglu", limit=0.7),
    "few rows": Layer(5, 1152, 4304, norm=True, part=64, activation="quick_gelu"),
}
IN_FP16_TOO = ("patch embed", "qkv", "fc1", "fc2", "fc2 in parts", "swiglu")
LINEAR_CASES = [(name, BF16) for name in LAYERS] + [(name, d) for d in (FP16, FP32) for name in IN_FP16_TOO]


def config_for(layer: Layer, dtype: torch.dtype, device: torch.device) -> LinearConfig:
    """What the encoder's plan would choose."""
    widest = 64 if layer.taps else 128 if layer.heads or layer.stats or layer.activation in ("gelu", "swiglu") else 256
    return linear_config(budget(layer.rows), layer.n, layer.k, dtype, Target.of(device), max_block_n=widest)


@pytest.mark.parametrize("name, dtype", LINEAR_CASES, ids=str)
def test_linear_is_within_the_rule(name: str, dtype: torch.dtype, device: torch.device) -> None:
    layer = LAYERS[name]
    t, config = tensors(layer, dtype, device), config_for(layer, dtype, device)
    ours = fused(layer, t, layer.rows + 70).run(linear, config)[0][: layer.rows]
    ref = fused(layer, t, wide=torch.float64).run(linear_ref, config)[0]
    if dtype is FP32:
        assert_within(ours, ref, fused(layer, t).run(linear_ref, config)[0], "against the reference:")
    else:
        assert_rounded_once(ours, ref, "against the reference:")
    if layer.massive:
        return  # the fold rounds w * gamma where PyTorch rounds what the norm has made small again: half as much again
    assert_within(ours, linear_cases.plain(layer, t, torch.float64), linear_cases.plain(layer, t, dtype))


@pytest.mark.parametrize("name", LAYERS)
def test_linear_gives_the_same_bits_every_time(name: str, device: torch.device) -> None:
    layer = LAYERS[name]
    arguments, config = fused(layer, tensors(layer, BF16, device)), config_for(layer, BF16, device)
    first, first_stats = arguments.run(linear, config)
    for _ in range(REPEATS):
        again, stats = arguments.run(linear, config)
        assert torch.equal(again, first)
        assert stats is None or first_stats is None or torch.equal(stats.partials, first_stats.partials)


@pytest.mark.parametrize("rows", [1, 127, 128, 777])  # 128: a tile's rows
@pytest.mark.parametrize("name", ["patch embed", "qkv", "proj", "fc1", "fc2"])
def test_rows_past_the_count_change_nothing(name: str, rows: int, device: torch.device) -> None:
    """`rows` of them in room for 1021, the rest NaN: bit for bit what exactly enough room gives."""
    config = config_for(LAYERS[name], BF16, device)
    layer = dataclasses.replace(LAYERS[name], rows=rows)
    t = tensors(layer, BF16, device)
    roomy, roomy_stats = fused(layer, t, ROWS).run(linear, config)
    exact, exact_stats = fused(layer, t).run(linear, config)
    assert roomy[:rows].isfinite().all()
    assert torch.equal(roomy[:rows], exact)
    if roomy_stats is not None and exact_stats is not None:
        assert torch.equal(roomy_stats.partials[:rows], exact_stats.partials)


def lengths_of(rng: pseudo_random.Random, longest: int) -> list[int]:
    """A batch of up to a dozen frames, one of them long enough for the rule's statistics to settle."""
    few = [rng.choice([1, 4, 16, 63, 64, 65, 128, 196, rng.randint(1, longest)]) for _ in range(rng.randint(0, 11))]
    few.insert(rng.randint(0, len(few)), rng.randint(longest // 2, longest))
    return few


@pytest.mark.parametrize("dtype, batches, longest", [(BF16, 60, 700), (FP16, 20, 700), (FP32, 4, 300)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_attention_is_within_the_rule(
    head_dim: int, dtype: torch.dtype, batches: int, longest: int, device: torch.device
) -> None:
    """336 ragged batches in all; prints how ours / PyTorch's error spreads."""
    rng = pseudo_random.Random(head_dim)
    verdicts = []
    for seed in range(batches):
        lengths = lengths_of(rng, longest)
        config = attention_config(budget(sum(lengths)), head_dim, dtype, Target.of(device))
        qkv = packed(lengths, head_dim, dtype, device, seed, heads=16)
        segs = segments(lengths, config.block_m, device, room=3)
        out = attention_cases.run(attention, with_room(qkv, 100), segs, head_dim, config)[:-100]
        ref = attention_cases.plain(qkv, lengths, head_dim, torch.float64)
        pt = attention_cases.plain(qkv, lengths, head_dim, dtype)
        verdicts.append(assert_within(out, ref, pt, f"{lengths}:"))
    print(f"attention, heads of {head_dim}, {dtype}: {summarize(verdicts)}")


ATTENTION_CONFIGS = {  # what ships, and what the tables may come to choose
    "ships": None,
    "128 queries": AttentionConfig(128, 64, 8, 2),
}


@pytest.mark.parametrize("config", ATTENTION_CONFIGS.values(), ids=ATTENTION_CONFIGS)
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_attention_gives_the_same_bits_every_time(
    head_dim: int, config: AttentionConfig | None, device: torch.device
) -> None:
    for lengths in ([196] * 8, [784, 784, 4, 65], [4096]):
        chosen = config or attention_config(budget(sum(lengths)), head_dim, BF16, Target.of(device))
        qkv = packed(lengths, head_dim, BF16, device, heads=16)
        segs = segments(lengths, chosen.block_m, device)
        first = attention_cases.run(attention, qkv, segs, head_dim, chosen)
        for _ in range(REPEATS):
            assert torch.equal(attention_cases.run(attention, qkv, segs, head_dim, chosen), first), lengths
        ref = attention_cases.plain(qkv, lengths, head_dim, torch.float64)
        assert_within(first, ref, attention_cases.plain(qkv, lengths, head_dim, BF16), str(lengths))


@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_nan_stays_in_its_segment(head_dim: int, device: torch.device) -> None:
    """Frames of NaN on both sides, NaN past the last: bit for bit as next to real numbers."""
    lengths = [5, 300, 9, 196, 70, 64, 6]
    config = attention_config(budget(sum(lengths)), head_dim, BF16, Target.of(device))
    qkv = packed(lengths, head_dim, BF16, device, heads=16)
    segs = segments(lengths, config.block_m, device)
    clean = attention_cases.run(attention, qkv, segs, head_dim, config).split(lengths)
    poisoned = qkv.clone()
    for frame in list(poisoned.split(lengths))[::2]:
        frame.fill_(NAN)
    out = attention_cases.run(attention, with_room(poisoned, 300), segs, head_dim, config)[:-300].split(lengths)
    for i, frame in enumerate(out):
        assert frame.isnan().all() if i % 2 == 0 else torch.equal(frame, clean[i]), f"frame {i}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_is_within_the_rule(dtype: torch.dtype, device: torch.device) -> None:
    x = random(ROWS, 1152, device=device)
    x[:, 300], x[:, 700] = 200.0, -2000.0
    x, weight = x.to(dtype), (1 + random(1152, seed=1, scale=0.2, device=device)).to(dtype)
    bias = random(1152, seed=2, device=device).to(dtype)
    out = layer_norm(with_room(x, 50), weight, bias, count(ROWS, device), with_room(x, 50), 1e-6, 132)
    ref = torch.nn.functional.layer_norm(x.double(), (1152,), weight.double(), bias.double(), 1e-6)
    assert_within(out[:ROWS], ref, torch.nn.functional.layer_norm(x, (1152,), weight, bias, 1e-6))


def test_metadata_matches_the_reference(device: torch.device) -> None:
    """Images, videos and empty rows; up to 80 items; sides up to 128 patches (2048 pixels)."""
    rng = pseudo_random.Random(0)
    for case in range(12):
        sides, items = (64, 6) if case == 0 else (rng.choice([2, 14]), 80)
        kinds = [(0, 0, 0), (1, 2, 2)] + [
            (rng.choice([0, 1, 1, 1, 2, 9]), 2 * rng.randint(1, sides), 2 * rng.randint(1, sides)) for _ in range(20)
        ]
        grid = rng.choices(kinds, k=rng.randint(0, items))
        options = {"head_dim": 72, "side": 48, "block_m": 64, "room": rng.choice([0, 1, 1000])}
        assert_same_packed(
            *(fill(op, grid, device, packed=True, **options) for op in (vision_metadata, vision_metadata_ref))
        )
        ours, ref = (fill(op, grid, device, **options) for op in (vision_metadata, vision_metadata_ref))
        assert_same(ours, ref, sum(frames_of(grid)))
        assert_padding(ours, grid, 64)


def test_fingerprint_matches_the_reference(device: torch.device) -> None:
    sources = FingerprintSources.of([random(n, 1152, seed=n, device=device).to(BF16) for n in (1, 1152, 4304, 50000)])
    hashes = fingerprint(sources, torch.zeros(4, dtype=torch.int32, device=device))
    assert torch.equal(hashes, fingerprint_ref(sources, torch.zeros(4, dtype=torch.int32, device=device)))
    sources.tensors[3].data.mul_(-1.0)
    again = fingerprint(sources, torch.zeros(4, dtype=torch.int32, device=device))
    assert (again != hashes).tolist() == [False, False, False, True]


@pytest.mark.parametrize("hooked", [False, True])
def test_fingerprints_and_a_grid_reach_the_host_on_their_own_stream(
    device: torch.device, hooked: bool, request: pytest.FixtureRequest
) -> None:
    told: list[object] = []
    if hooked:  # as Triton's profiler does
        knobs.runtime.launch_enter_hook.add(told.append)
        request.addfinalizer(lambda: knobs.runtime.launch_enter_hook.remove(told.append))
    sources = FingerprintSources.of([random(n, 1152, seed=n, device=device).to(BF16) for n in (1, 1152)])
    wanted = fingerprint_ref(sources, torch.zeros(2, dtype=torch.int32, device=device)).cpu()
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    for again, dtype in itertools.product(range(3), (torch.int32, torch.int64)):  # compiled, then launched directly
        grid = torch.randint(1, 100, (90 + again, 3), device=device).to(dtype)
        out = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        rows = torch.zeros(128, 3, dtype=torch.int64, pin_memory=True)
        torch.cuda.synchronize(device)
        fingerprint(sources, out, grid, rows, stream)
        stream.synchronize()
        assert torch.equal(out, wanted)
        assert torch.equal(rows[: grid.shape[0]], grid.cpu().long()) and not rows[grid.shape[0] :].any()
    assert len(told) == 6 * hooked


def test_linear_past_two_to_the_31(device: torch.device) -> None:
    """An output of 2.2e9 elements: its last rows bit for bit as when computed alone."""
    rows, last = 500_003, 300  # 498,950 rows of 4304 are 2^31
    weight = random(4304, 1152, scale=0.03, device=device).to(BF16)
    x = random(rows, 1152, seed=1, device=device).to(BF16)
    config = linear_config(budget(rows), 4304, 1152, BF16, Target.of(device))
    epilogue = Epilogue(activation="gelu_tanh")
    whole = linear(x, weight, count(rows, device), x.new_full((rows, 4304), NAN), epilogue, config)
    tail = linear(x[-last:], weight, count(last, device), x.new_full((last, 4304), NAN), epilogue, config)
    assert torch.equal(whole[-last:], tail)
    assert whole[::997].isfinite().all()


def test_attention_past_two_to_the_31(device: torch.device) -> None:
    """q | k | v of 2.2e9 elements: the last frames bit for bit as when computed alone."""
    frames, length = 3200, 196  # 621,379 rows of 3456 are 2^31
    config = attention_config(budget(frames * length), 72, BF16, Target.of(device))
    qkv = packed([frames * length], 72, BF16, device, heads=16)
    segs = segments([length] * frames, config.block_m, device)
    whole = attention_cases.run(attention, qkv, segs, 72, config)
    few = segments([length] * 3, config.block_m, device)
    tail = attention_cases.run(attention, qkv[-3 * length :].clone(), few, 72, config)
    assert torch.equal(whole[-3 * length :], tail)
