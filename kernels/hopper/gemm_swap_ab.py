"""`kernels.linear` for Hopper, the other way round: out^T = w x^T, in tiles of any multiple of 8 rows.

The formula is that of `kernels.linear`, which is this function's twin. An instruction has 64 rows and any multiple of 8
columns. `kernels.hopper.linear` makes rows of x the former; here these are features of w, and rows of x the latter, so
that tiles fit the rows there are: 784 are 7 x 112 where they would be 13 x 64, and 18 x 7 tiles of 64 x 112 run at once
on 132 SMs. A CTA has one tile, and nothing hides its epilogue: for products of one wave.

    producer : w and x of a k-step -> the ring (TMA; a `full` and an `empty` barrier a stage), and behind the last step,
               as further steps, residual or rotary words, a chunk of 64 rows a step, where weights were
    consumer : ring -> WGMMA, 64 features -> epilogue, a chunk at a time, in the place of its own weights -> TMA store;
               behind a norm each merges the moments of its share of the rows for all (`merged`)

tests/kernels/hopper_transposed_protocol.py runs this protocol in plain Python under random interleaving.
"""

from typing import Any

import torch
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusedvit.kernels.codegen_checks import misplaced_ring
from fusedvit.kernels.epilogue import Epilogue, NormFold, Rope, Taps
from fusedvit.kernels.hopper import gemm_swap_ab_configs as configs
from fusedvit.kernels.hopper.gemm import _box, _constants, _extra_box, unsupported_operands
from fusedvit.kernels.hopper.gemm_epilogue import (
    Tail,
    _activate,
    _chan,
    _channels,
    _moments,
    _normed,
    _store_moments,
    _unpack,
)
from fusedvit.kernels.hopper.gemm_swap_ab_configs import UNIT, UNIT_BYTES, HopperSwapABConfig, unsupported_shape
from fusedvit.kernels.hopper.gluon_compat import (
    TensorDescriptor,
    async_load,
    async_store,
    barrier,
    gl,
    gluon,
    record,
    reinterpret,
)
from fusedvit.kernels.launch import Loaded, launch
from fusedvit.kernels.tma import rows_behind

# ── transposed parts ──────────────────────────────────────────────────────────────────────────────────────────────────
# What the warps of `kernels.hopper.transposed` share: records, and the instructions of a product of any width.
#
# Gluon's own product has power-of-two tiles. An instruction of Hopper has 64 rows and any multiple of 8 columns, so it is
# written here as text. Its operands are found by address: the ring lies where shared memory begins, as
# `sass.misplaced_ring` makes sure.


@record
class Tile:
    """What is known of a launch when it is compiled."""

    N: gl.constexpr
    K: gl.constexpr
    ROWS: gl.constexpr  # of x and of the output, in a tile: columns of the instructions
    WIDTH: gl.constexpr  # rows of a chunk: an accumulator's columns, a power of two
    BOX: gl.constexpr  # rows that are brought at once where 64 are too many
    CONSUMERS: gl.constexpr  # 64 features each
    STAGES: gl.constexpr
    BRINGS: gl.constexpr  # whether residual or rotary words follow the operands


@record
class Ring:
    """Operands on their way, in one allocation, at the beginning of shared memory.

    Units of [64, 64] values: the weights of every stage and consumer, then every stage's rows of x, a unit a chunk; and
    behind a norm one more, for the moments of the tile's rows.
    """

    units: gl.shared_memory_descriptor  # [stages * (consumers + chunks) and the last one, 64, 64]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    merged: gl.shared_memory_descriptor  # every consumer has merged its share of the moments


@record
class Boxes:
    x: tma.tensor_descriptor  # [T, K], BOX rows
    wide: tma.tensor_descriptor  # [T, K], 64 rows
    w: tma.tensor_descriptor  # [N / 16, 2, 8, K]: of 16 rows the even ones, then the odd ones
    out: tma.tensor_descriptor  # [T, N], BOX rows
    extra: tma.tensor_descriptor  # residual [T, N] or rotary words [T, ...], BOX rows


chunks_of = gluon.constexpr_function(configs.chunks_of)
units_of = gluon.constexpr_function(configs.units_of)


@gluon.constexpr_function
def rows_of(rows, chunk):
    """Rows of a chunk."""
    return min(64, rows - 64 * chunk)


@gluon.jit
def _weights(ring, tile, stage, C: gl.constexpr):
    """Consumer C's weights; at the end, what is brought for it and what it sends."""
    return ring.units.index(stage * tile.CONSUMERS + C)


@gluon.jit
def _rows(ring, tile, stage, H: gl.constexpr):
    """Chunk H of x."""
    return ring.units.index(tile.STAGES * tile.CONSUMERS + stage * chunks_of(tile.ROWS) + H)


WEIGHTS_BOX = gl.NVMMASharedLayout(128, 16, 4)  # of four times 16 rows, the even ones and the odd ones
PAIRED = gl.constexpr(WEIGHTS_BOX)
# Of a matrix in rows of 128 bytes, swizzled: eight rows are 1024 bytes from the next ones.
DESCRIPTOR = hex(1 << 62 | (1024 >> 4) << 32 | 1 << 16)


@gluon.constexpr_function
def _step_text(rows, width, consumers, stages, consumer, kind):
    """A step of K = 64: registers of the sums first, then the stage, as often as there are elements."""
    chunks = chunks_of(rows)
    held = chunks * width // 2
    stage = f"${2 * held}"
    sums = ", ".join(f"${i}" for i in range(rows // 2))
    product = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{kind}.{kind} {{{sums}}}, a, b, more, 1, 1, 0, 0;"
    onward = " add.u64 a, a, 2; add.u64 b, b, 2; "  # 16 values on, in units of 16 bytes
    return f"""{{ .reg .b32 base, at; .reg .b64 a, b; .reg .pred more;
        setp.eq.u32 more, 0, 0;
        mov.u32 base, global_smem;
        mad.lo.u32 at, {stage}, {UNIT_BYTES * consumers}, base; add.u32 at, at, {UNIT_BYTES * consumer};
        shr.u32 at, at, 4; cvt.u64.u32 a, at; or.b64 a, a, {DESCRIPTOR};
        mad.lo.u32 at, {stage}, {UNIT_BYTES * chunks}, base; add.u32 at, at, {UNIT_BYTES * consumers * stages};
        shr.u32 at, at, 4; cvt.u64.u32 b, at; or.b64 b, b, {DESCRIPTOR};
        wgmma.fence.sync.aligned;
        {onward.join([product] * 4)}
        wgmma.commit_group.sync.aligned; }}"""


@gluon.constexpr_function
def _wait_text(steps):
    return f"wgmma.wait_group.sync.aligned {steps};"


@gluon.constexpr_function
def _constraints(registers, more):
    """So many registers out and, the same ones, in; `more` others in."""
    return ",".join(["=f"] * registers + [str(i) for i in range(registers)] + ["r"] * more)


@gluon.jit
def _multiply(tile, sums, stage, C: gl.constexpr, dtype: gl.constexpr):
    """Issues one step's products; they are still running when it returns."""
    EACH: gl.constexpr = tile.WIDTH // 2
    KIND: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    TEXT: gl.constexpr = _step_text(tile.ROWS, tile.WIDTH, tile.CONSUMERS, tile.STAGES, C, KIND)
    REGISTERS: gl.constexpr = _constraints(len(sums) * EACH, EACH)
    if len(sums) == 3:
        x, y, z = gl.inline_asm_elementwise(
            TEXT, REGISTERS, [sums[0], sums[1], sums[2], stage],
            dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=EACH,
        )  # fmt: skip
        return x, y, z
    elif len(sums) == 2:
        x, y = gl.inline_asm_elementwise(
            TEXT, REGISTERS, [sums[0], sums[1], stage], dtype=(gl.float32, gl.float32), is_pure=False, pack=EACH
        )  # fmt: skip
        return x, y
    else:
        x = gl.inline_asm_elementwise(TEXT, REGISTERS, [sums[0], stage], dtype=gl.float32, is_pure=False, pack=EACH)
        return (x,)


@gluon.jit
def _settle(tile, sums, STEPS: gl.constexpr):
    """Waits until at most STEPS steps are running."""
    EACH: gl.constexpr = tile.WIDTH // 2
    TEXT: gl.constexpr = _wait_text(STEPS)
    REGISTERS: gl.constexpr = _constraints(len(sums) * EACH, 0)
    if len(sums) == 3:
        x, y, z = gl.inline_asm_elementwise(
            TEXT, REGISTERS, [sums[0], sums[1], sums[2]],
            dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=EACH,
        )  # fmt: skip
        return x, y, z
    elif len(sums) == 2:
        x, y = gl.inline_asm_elementwise(
            TEXT, REGISTERS, [sums[0], sums[1]], dtype=(gl.float32, gl.float32), is_pure=False, pack=EACH
        )  # fmt: skip
        return x, y
    else:
        x = gl.inline_asm_elementwise(TEXT, REGISTERS, [sums[0]], dtype=gl.float32, is_pure=False, pack=EACH)
        return (x,)


@gluon.jit
def _place(tile, num_rows):
    """This program's tile: (first row, first column); where rows are fewer than expected, a column past the last."""
    num_m = gl.maximum(1, (num_rows + tile.ROWS - 1) // tile.ROWS)
    pid = gl.program_id(0)
    col0 = pid // num_m * (64 * tile.CONSUMERS)
    return pid % num_m * tile.ROWS, gl.where(num_rows > 0, col0, tile.N)


@gluon.jit
def _next_stage(tile, stage, phase):
    """The stage after `stage`, and the parity of its round: counted, as a division would take longer than a step."""
    last = stage == tile.STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


# ── transposed tail ───────────────────────────────────────────────────────────────────────────────────────────────────
# What a consumer of `kernels.hopper.transposed` does with its sums: 64 features of up to 64 rows at a time.
#
# Weights come with the even rows of every 16 before the odd ones, so that a thread holds features 2p and 2p + 1 of its
# rows: a rotary pair, and the halves of a word that goes to shared memory, where a row's features are a line.

WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # a token's 64 features in words of two
LINES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROOM = gl.constexpr(256)  # rows whose moments there is room for: all consumers' shares


@gluon.constexpr_function
def share_of(rows, consumers):
    """Rows of a tile whose moments a consumer merges for all: a power of two, 8 threads or fewer each, as many as eight
    parts have pairs of moments."""
    return max(16, 1 << (-(-rows // consumers) - 1).bit_length())


@gluon.jit
def _features(x, WIDTH: gl.constexpr):
    """(even, odd) features of a chunk's sums [64, WIDTH]: [32, WIDTH] each."""
    even, odd = x.reshape([4, 2, 8, WIDTH]).permute([0, 2, 3, 1]).split()
    return even.reshape([32, WIDTH]), odd.reshape([32, WIDTH])


@gluon.jit
def _ask_parts(tail, rows, start: gl.constexpr, L: gl.constexpr):
    """Parts start ... start + 7 of the statistics of `rows` as they lie."""
    offs = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, L)), 0)
    ptrs = tail.stats_in_ptr + 2 * start + gl.expand_dims(rows, 1) + offs
    return gl.load(ptrs, mask=offs < 2 * (tail.IN_PARTS - start), other=0.0)


@gluon.jit
def _ask_moments(tile, tail, row0, C: gl.constexpr):
    """The statistics of consumer C's share of the tile's rows, on their way: eight parts at a time."""
    SHARE: gl.constexpr = share_of(tile.ROWS, tile.CONSUMERS)
    EACH: gl.constexpr = 128 // SHARE if SHARE < 128 else 1  # threads of a row
    L: gl.constexpr = gl.BlockedLayout([1, 16 // EACH], [32 // EACH, EACH], [4, 1], [1, 0])
    found = ()
    if tail.IN_PARTS > 0:
        rows = row0.to(gl.int64) + C * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, L))
        rows = gl.minimum(rows, tail.num_rows - 1) * (2 * tail.IN_PARTS)
        for start in gl.static_range(0, tail.IN_PARTS, 8):
            found = found + (_ask_parts(tail, rows, start, L),)  # type: ignore[assignment]  # a tuple that grows
    return found


@gluon.jit
def _merge_parts(tail, both, start: gl.constexpr):
    """(channels, mean, M2) of what `_ask_parts` got."""
    COUNT: gl.constexpr = both.shape[0]
    PER_LENGTH: gl.constexpr = (tail.IN_LENGTH + tail.IN_WIDTH - 1) // tail.IN_WIDTH
    CHANNELS: gl.constexpr = _channels(start, 8, tail.IN_PARTS, tail.IN_WIDTH, tail.IN_LENGTH)
    mean, m2 = both.reshape([COUNT, 8, 2]).split()
    part = start + gl.arange(0, 8, gl.SliceLayout(0, mean.type.layout))
    size = gl.minimum(tail.IN_LENGTH - (part % PER_LENGTH) * tail.IN_WIDTH, tail.IN_WIDTH)
    size = gl.expand_dims(gl.where(part < tail.IN_PARTS, size, 0).to(gl.float32), 0)
    total = gl.sum(mean * size, 1) * (1.0 / CHANNELS)
    spread = mean - gl.expand_dims(total, 1)
    return CHANNELS, total, gl.sum(m2 + size * spread * spread, 1)


@gluon.jit
def _places(tile, ring, WIDTH: gl.constexpr):
    """Where moments are kept, WIDTH rows a line: the means of up to ROOM rows, then the others."""
    LAST: gl.constexpr = tile.STAGES * (tile.CONSUMERS + chunks_of(tile.ROWS))
    return reinterpret(ring.units.index(LAST), gl.float32, [2 * ROOM // WIDTH, WIDTH], VECTOR)


@gluon.jit
def _keep_moments(tile, tail, ring, C: gl.constexpr, parts):
    """(mean, 1 / sqrt(var + eps)) of `_ask_moments` into shared memory; of an RMSNorm (any, 1 / rms)."""
    if tail.IN_PARTS > 0:
        SHARE: gl.constexpr = share_of(tile.ROWS, tile.CONSUMERS)
        places = _places(tile, ring, SHARE)
        count, mean, m2 = _merge_parts(tail, parts[0], 0)
        for i in gl.static_range(1, len(parts)):
            more, more_mean, more_m2 = _merge_parts(tail, parts[i], 8 * i)
            count, mean, m2 = _chan(count, mean, m2, more, more_mean, more_m2)
        square = m2 / count
        if not tail.CENTRED:
            square += mean * mean
        places.index(C).store(mean)
        places.index(C + ROOM // SHARE).store(gl.rsqrt(square + tail.EPS))
        barrier()  # every thread's stores come before the one thread's arrival
        mbarrier.arrive(ring.merged.index(0), count=1)


@gluon.jit
def _await_moments(tail, ring):
    """Waits until every consumer has kept its share."""
    if tail.IN_PARTS > 0:
        mbarrier.wait(ring.merged.index(0), 0)


@gluon.jit
def _of_features(ptr, tail, col0, ODD: gl.constexpr, L: gl.constexpr):
    """Every second value of a vector from `col0` on, 32 of them; 0 past the last."""
    cols = col0 + ODD + 2 * gl.arange(0, 32, L)
    return gl.load(ptr + cols, mask=cols < tail.N, other=0.0).to(gl.float32)


@gluon.jit
def _load_vectors(tail, col0, L: gl.constexpr):
    """(bias, colsum) of even and odd features, asked for before the main loop, which hides their latency."""
    none = gl.zeros([32], gl.float32, L)
    bias0, bias1, sum0, sum1 = none, none, none, none
    if tail.HAS_BIAS:
        bias0, bias1 = _of_features(tail.bias_ptr, tail, col0, 0, L), _of_features(tail.bias_ptr, tail, col0, 1, L)
    if tail.IN_PARTS > 0 and tail.CENTRED:
        sum0, sum1 = _of_features(tail.colsum_ptr, tail, col0, 0, L), _of_features(tail.colsum_ptr, tail, col0, 1, L)
    return bias0, bias1, sum0, sum1


@gluon.jit
def _kept_moments(tile, tail, ring, H: gl.constexpr, L: gl.constexpr):
    """(mean, 1 / std) of chunk H's rows."""
    mean = gl.zeros([tile.WIDTH], gl.float32, L)
    rstd = mean
    if tail.IN_PARTS > 0:
        kept = _places(tile, ring, tile.WIDTH)
        mean = kept.index(H).load(L)
        rstd = kept.index(H + ROOM // tile.WIDTH).load(L)
    return mean, rstd


@gluon.jit
def _pack(even, odd, dtype: gl.constexpr):
    """Two features of a row, rounded, in a word."""
    if dtype == gl.bfloat16:
        TEXT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        TEXT: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"  # type: ignore[no-redef]  # the other branch's is gone
    return gl.inline_asm_elementwise(TEXT, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack_pair(word, dtype: gl.constexpr):
    """The two of `_pack` as fp32."""
    if dtype == gl.bfloat16:
        TEXT: gl.constexpr = """{ .reg .b32 a; shl.b32 a, $2, 16; mov.b32 $0, a;
            and.b32 a, $2, 0xFFFF0000; mov.b32 $1, a; }"""
    else:
        TEXT: gl.constexpr = (  # type: ignore[no-redef]
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
        )
    return gl.inline_asm_elementwise(
        TEXT, "=f,=f,r", [word], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _finish(tile, tail, words, vectors, ring, even, odd, col0, H: gl.constexpr, dtype: gl.constexpr):
    """Everything between product and rounding, on a chunk's (even, odd); `words` holds what the producer brought."""
    P: gl.constexpr = even.type.layout
    bias0, bias1, sum0, sum1 = vectors
    mean, rstd = _kept_moments(tile, tail, ring, H, gl.SliceLayout(0, P))
    even = _normed(even, tail, bias0, sum0, mean, rstd, 1)
    odd = _normed(odd, tail, bias1, sum1, mean, rstd, 1)
    if tail.ROPE_COLS > 0:
        if col0 < tail.ROPE_COLS:
            cos, sin = _unpack(words.load(P))
            even, odd = even * cos - odd * sin, odd * cos + even * sin
    even, odd = _activate(even, tail.ACT, dtype), _activate(odd, tail.ACT, dtype)
    if tail.HAS_RESIDUAL:
        more0, more1 = _unpack_pair(words.load(P), dtype)
        even, odd = even + more0, odd + more1
    return even, odd


@gluon.jit
def _store_statistics(tile, tail, lines, row0, col0, H: gl.constexpr):
    """Moments of each row's 64 features as rounded, 128 / WIDTH threads a row."""
    L: gl.constexpr = gl.BlockedLayout([1, tile.WIDTH // 2], [tile.WIDTH // 4, 128 // tile.WIDTH], [4, 1], [1, 0])
    mean, m2 = _moments(lines.load(L).to(gl.float32))
    inside = 64 * H + gl.arange(0, tile.WIDTH, gl.SliceLayout(1, L))
    rows = row0.to(gl.int64) + inside
    _store_moments(mean, m2, tail, rows, (rows < tail.num_rows) & (inside < tile.ROWS), col0 // 64)


@gluon.jit
def _end_chunk(tile, tail, ring, unit, boxes, vectors, x, row0, col0, H: gl.constexpr):
    """From chunk H's sums to their way out, by `unit`, where what the producer brought lies."""
    dtype: gl.constexpr = boxes.out.dtype
    HERE: gl.constexpr = rows_of(tile.ROWS, H)
    even, odd = _features(x, tile.WIDTH)
    words = reinterpret(unit, gl.int32, [tile.WIDTH, 32], WORDS).permute((1, 0))
    even, odd = _finish(tile, tail, words, vectors, ring, even, odd, col0, H, dtype)
    words.store(_pack(even, odd, dtype))
    fence_async_shared()
    lines = reinterpret(unit, dtype, [64 // tile.BOX, tile.BOX, 64], LINES)
    for i in gl.static_range(HERE // tile.BOX):
        async_store(boxes.out, [row0 + 64 * H + i * tile.BOX, col0], lines.index(i))
    if tail.OUT_WIDTH > 0:
        _store_statistics(tile, tail, reinterpret(unit, dtype, [tile.WIDTH, 64], LINES), row0, col0, H)


# ── transposed warps ──────────────────────────────────────────────────────────────────────────────────────────────────
# The warps of `kernels.hopper.transposed`: the producer, and a consumer's way from its first step to its output.


@gluon.jit
def _load_weights(tile, ring, boxes, stage, col0, k, dtype: gl.constexpr):
    """A step's weights; its barrier expects x with them."""
    full = ring.full.index(stage)
    mbarrier.expect(full, (64 * tile.CONSUMERS + tile.ROWS) * 128)
    for c in gl.static_range(tile.CONSUMERS):
        unit = reinterpret(_weights(ring, tile, stage, c), dtype, [4, 2, 8, 64], PAIRED)
        col = _inside(col0, 64 * c, tile.N)
        async_load(boxes.w, [col // 16, 0, 0, k * 64], full, unit)


@gluon.jit
def _inside(first, behind: gl.constexpr, end):
    """Where a box begins that lies `behind` a tile's first; there itself where it would lie past the end, as such boxes
    take longer."""
    return gl.where(first + behind < end, first + behind, first)


@gluon.jit
def _load_rows(tile, tail, ring, boxes, stage, row0, k, dtype: gl.constexpr):
    """A step's rows of x."""
    full = ring.full.index(stage)
    for h in gl.static_range(chunks_of(tile.ROWS)):
        unit = _rows(ring, tile, stage, h)
        if rows_of(tile.ROWS, h) == 64:
            async_load(boxes.wide, [_inside(row0, 64 * h, tail.num_rows), k * 64], full, unit)
        else:
            lines = reinterpret(unit, dtype, [64 // tile.BOX, tile.BOX, 64], LINES)
            for i in gl.static_range(rows_of(tile.ROWS, h) // tile.BOX):
                row = _inside(row0, 64 * h + i * tile.BOX, tail.num_rows)
                async_load(boxes.x, [row, k * 64], full, lines.index(i))


@gluon.jit
def _bring(tile, tail, ring, boxes, stage, row0, col0, H: gl.constexpr, dtype: gl.constexpr):
    """Residual or rotary words of chunk H, where each consumer's weights were."""
    PAIRS: gl.constexpr = tail.HEAD_DIM // 2
    HERE: gl.constexpr = rows_of(tile.ROWS, H)
    full = ring.full.index(stage)
    mbarrier.expect(full, tile.CONSUMERS * HERE * 128)
    for c in gl.static_range(tile.CONSUMERS):
        unit, col = _weights(ring, tile, stage, c), col0 + 64 * c
        for i in gl.static_range(HERE // tile.BOX):
            row = _inside(row0, 64 * H + i * tile.BOX, tail.num_rows)
            if tail.HAS_RESIDUAL:
                lines = reinterpret(unit, dtype, [64 // tile.BOX, tile.BOX, 64], LINES)
                async_load(boxes.extra, [row, col], full, lines.index(i))
            else:
                words = reinterpret(unit, gl.int32, [64 // tile.BOX, tile.BOX, 32], WORDS)
                async_load(boxes.extra, [row, col // 2 % PAIRS], full, words.index(i))


@gluon.jit
def _producer(tile, tail, ring, boxes):
    STEPS: gl.constexpr = (tile.K + 63) // 64
    CHUNKS: gl.constexpr = chunks_of(tile.ROWS)
    dtype: gl.constexpr = ring.units.dtype
    row0, col0 = _place(tile, tail.num_rows)
    # As many as there are stages, which the compiler does not know: one code for all of them.
    ahead = gl.minimum(tail.num_rows * tile.STAGES, tile.STAGES)
    if col0 < tile.N:
        for k in range(0, ahead):  # while the previous launch is still busy with x
            _load_weights(tile, ring, boxes, k, col0, k, dtype)
        gdc_wait()
        for k in range(0, ahead):
            _load_rows(tile, tail, ring, boxes, k, row0, k, dtype)
        stage, phase = ahead - tile.STAGES, ahead - tile.STAGES
        for k in range(ahead, STEPS):
            mbarrier.wait(ring.empty.index(stage), phase)
            _load_weights(tile, ring, boxes, stage, col0, k, dtype)
            _load_rows(tile, tail, ring, boxes, stage, row0, k, dtype)
            stage, phase = _next_stage(tile, stage, phase)
        if tile.BRINGS:
            for h in gl.static_range(CHUNKS):
                mbarrier.wait(ring.empty.index(stage), phase)
                _bring(tile, tail, ring, boxes, stage, row0, col0, h, dtype)
                stage, phase = _next_stage(tile, stage, phase)


@gluon.jit
def _zeros(tile):
    """A consumer's sums, [64, WIDTH] a chunk."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile.WIDTH, 16])
    sums = ()
    for _ in gl.static_range(chunks_of(tile.ROWS)):
        sums = sums + (gl.zeros([64, tile.WIDTH], gl.float32, L),)
    return sums


@gluon.jit
def _main_loop(tile, tail, ring, parts, C: gl.constexpr):
    """(sums, the stage behind the last step, its round's parity); moments are merged under the first step's products,
    where registers allow it."""
    STEPS: gl.constexpr = (tile.K + 63) // 64
    UNDER: gl.constexpr = chunks_of(tile.ROWS) < 3
    dtype: gl.constexpr = ring.units.dtype
    if not UNDER:
        _keep_moments(tile, tail, ring, C, parts)
    before = gl.minimum(tail.num_rows, 0)  # 0, unknown to the compiler
    stage, phase = _next_stage(tile, before, before)
    mbarrier.wait(ring.full.index(0), 0)
    sums = _multiply(tile, _zeros(tile), before, C, dtype)
    if UNDER:
        _keep_moments(tile, tail, ring, C, parts)
    for _ in range(1, STEPS):
        mbarrier.wait(ring.full.index(stage), phase)
        sums = _multiply(tile, sums, stage, C, dtype)
        sums = _settle(tile, sums, 1)
        mbarrier.arrive(ring.empty.index(before), count=1)
        before = stage
        stage, phase = _next_stage(tile, stage, phase)
    sums = _settle(tile, sums, 0)
    mbarrier.arrive(ring.empty.index(before), count=1)
    return sums, stage, phase


@gluon.jit
def _consumer(tile, tail, ring, boxes, C: gl.constexpr):
    row0, tile_col0 = _place(tile, tail.num_rows)
    col0 = tile_col0 + 64 * C
    even, _ = _features(_zeros(tile)[0], tile.WIDTH)
    vectors = _load_vectors(tail, col0, gl.SliceLayout(1, even.type.layout))
    gdc_wait()
    if tile_col0 < tile.N:
        parts = _ask_moments(tile, tail, row0, C)
        sums, stage, phase = _main_loop(tile, tail, ring, parts, C)
        _await_moments(tail, ring)
        for h in gl.static_range(chunks_of(tile.ROWS)):
            if tile.BRINGS:
                mbarrier.wait(ring.full.index(stage), phase)
            if col0 < tile.N:
                unit = _weights(ring, tile, stage, C)
                _end_chunk(tile, tail, ring, unit, boxes, vectors, sums[h], row0, col0, h)
            stage, phase = _next_stage(tile, stage, phase)
        tma.store_wait(0)


# ── transposed ────────────────────────────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def _consumer_0(tile, tail, ring, boxes):
    _consumer(tile, tail, ring, boxes, 0)


@gluon.jit
def _consumer_1(tile, tail, ring, boxes):
    _consumer(tile, tail, ring, boxes, 1)


@gluon.jit
def _consumer_2(tile, tail, ring, boxes):
    _consumer(tile, tail, ring, boxes, 2)


@gluon.jit
def _consumer_3(tile, tail, ring, boxes):
    _consumer(tile, tail, ring, boxes, 3)


@gluon.jit
def _transposed_linear_kernel(
    x_desc,  # [T, K]
    wide_desc,  # [T, K]
    w_desc,  # [N / 16, 2, 8, K]
    out_desc,  # [T, N]
    extra_desc,  # residual [T, N] or rotary words [T, W]; a stand-in where there is neither
    bias_ptr,
    colsum_ptr,
    stats_in_ptr,
    stats_out_ptr,
    num_rows_ptr,  # [1] int32: the true T
    N: gl.constexpr,
    K: gl.constexpr,
    EPS: gl.constexpr,
    IN_PARTS: gl.constexpr,
    CENTRED: gl.constexpr,
    IN_WIDTH: gl.constexpr,
    IN_LENGTH: gl.constexpr,
    ROPE_COLS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TAPS: gl.constexpr,
    ACT: gl.constexpr,
    LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    OUT_WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    BOX: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    num_rows = gl.load(num_rows_ptr)  # first, as all tiles hang on it
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    UNITS: gl.constexpr = units_of(chunks_of(ROWS), CONSUMERS, STAGES, IN_PARTS > 0)
    units = gl.allocate_shared_memory(x_desc.dtype, [UNITS, 64, 64], LINES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    merged = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    if IN_PARTS > 0:
        mbarrier.init(merged.index(0), count=CONSUMERS)
    for i in gl.static_range(STAGES):  # in turns, as Triton has the CTA meet between two of one array
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    gdc_launch_dependents()

    tile = Tile(N, K, ROWS, WIDTH, BOX, CONSUMERS, STAGES, HAS_RESIDUAL or ROPE_COLS > 0)
    tail = Tail(
        bias_ptr, colsum_ptr, stats_in_ptr, num_rows_ptr, num_rows_ptr, num_rows_ptr, stats_out_ptr,
        num_rows, N, EPS, IN_PARTS, CENTRED, IN_WIDTH, IN_LENGTH, ROPE_COLS, HEAD_DIM, TAPS, ACT, LIMIT, HAS_BIAS,
        HAS_RESIDUAL, OUT_WIDTH,
    )  # fmt: skip
    ring = Ring(units, full, empty, merged)
    boxes = Boxes(x_desc, wide_desc, w_desc, out_desc, extra_desc)
    args = (tile, tail, ring, boxes)
    MORE: gl.constexpr = CONSUMER_REGISTERS
    if CONSUMERS == 4:
        gl.warp_specialize(
            [(_consumer_0, args), (_consumer_1, args), (_consumer_2, args), (_consumer_3, args), (_producer, args)],
            [4, 4, 4, 1],
            [MORE, MORE, MORE, PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [(_consumer_0, args), (_consumer_1, args), (_consumer_2, args), (_producer, args)],
            [4, 4, 1],
            [MORE, MORE, PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer_0, args), (_consumer_1, args), (_producer, args)], [4, 1], [MORE, PRODUCER_REGISTERS]
        )
    else:
        gl.warp_specialize([(_consumer_0, args), (_producer, args)], [1], [PRODUCER_REGISTERS])


_NO_NORM, _NO_ROPE, _NO_TAPS = NormFold(), Rope(), Taps()
_placed: set[Loaded] = set()  # compiled kernels whose ring is where it must be


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    config: HopperSwapABConfig,
) -> torch.Tensor:
    """See `kernels.linear.linear`.

    Raises:
        ValueError: what `unsupported` says, before any launch.
        RuntimeError: this Triton puts the ring elsewhere; what was launched then is wrong.
    """
    (rows, k), n = x.shape, weight.shape[0]
    e = epilogue
    reason = unsupported(e, x, n, config)
    if reason:
        raise ValueError(f"linear in its transposed form takes {reason}")
    assert weight.shape[1] == k and out.shape == (rows, n), f"x {x.shape}, weight {weight.shape}, out {out.shape}"
    norm, rope = e.norm or _NO_NORM, e.rope or _NO_ROPE
    pointers = (
        e.bias,
        norm.colsum,
        None if norm.stats is None else norm.stats.partials,
        None if e.stats is None else e.stats.partials,
    )
    loaded = launch(
        _transposed_linear_kernel,
        config.tiles(rows, n),
        _boxes(x, weight, out, e, config),
        tuple(num_rows if p is None else p for p in pointers) + (num_rows,),
        _constants(n, k, e, norm, rope, _NO_TAPS) | config.constants(),
        config.options(),
    )
    if loaded is not None and loaded not in _placed:
        said = misplaced_ring(loaded.ptx(), config.ring_bytes(e.norm is not None))
        if said:
            raise RuntimeError(said)
        _placed.add(loaded)
    return out


def unsupported(e: Epilogue, x: torch.Tensor, n: int, config: HopperSwapABConfig) -> str:
    """Why this product and what follows it cannot run here, or ""."""
    if e.gated or e.taps is not None:
        return "no swiglu and no position taps"
    if e.stats is not None and (e.stats.width != config.block_n or n % config.block_n):
        return f"statistics of whole {config.block_n}s in parts of as many, got {n} in parts of {e.stats.width}"
    return unsupported_operands(e, x) or unsupported_shape(n, x.shape[1], config.stages)


def _boxes(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, e: Epilogue, config: HopperSwapABConfig
) -> tuple[Any, ...]:
    box, tile = config.box, config.rows
    out_box = _box(out, box)
    extra = _extra_box(e, box, tile) or out_box
    return _box(x, box, tile=tile), _box(x, UNIT, tile=tile), _weights_box(weight, config.cols), out_box, extra


def _weights_box(weight: torch.Tensor, tile: int) -> Any:
    """64 rows of weights, of every 16 the even ones before the odd ones."""
    n, k = rows_behind(weight, tile), weight.shape[1]
    pitch = weight.stride(0)
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = weight
    descriptor.shape = [n // 16, 2, 8, k]
    descriptor.strides = [16 * pitch, pitch, 2 * pitch, 1]
    descriptor.block_shape = [4, 2, 8, 64]
    descriptor.layout = WEIGHTS_BOX
    return descriptor
