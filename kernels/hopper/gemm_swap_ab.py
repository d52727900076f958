"""The linear layer on Hopper with operands swapped: out^T = w x^T, in tiles of any multiple of 8 rows.

    out^T = epilogue(w x^T)        x [T, K], w [N, K], out [T, N]; the formula is that of `kernels.linear`

A WGMMA has 64 rows and any multiple of 8 columns. `kernels.hopper.gemm` gives its rows to tokens; here they go to
output features, and tokens are columns, so that tiles fit the tokens there are: 784 are 7 x 112 where they would be
13 x 64, and 18 x 7 tiles of 64 x 112 run at once on 132 SMs. A CTA has one tile and nothing hides its epilogue, so
this is for products of one wave.

    producer : w and x of a K step -> a multistage pipeline in shared memory (TMA; a `full` and an `empty` barrier a
               stage); behind the last step, as further steps, residual or packed cos/sin of 64 rows each, where weights
               were
    consumer : pipeline -> WGMMA, 64 features -> epilogue, a chunk of 64 rows at a time, in the memory of its own
               weights -> TMA store; behind a norm each consumer merges the moments of some rows for all (`merged`)

Gluon's product has power-of-two tiles, so the WGMMA is inline PTX. It finds its operands by address: the pipeline lies
where shared memory begins, which `gluon_compat.misplaced_operands` makes sure of.

Weights come with the even rows of every 16 before the odd ones. So a thread holds features 2p and 2p + 1 of its rows:
a rotary pair, and two 16-bit values that go to shared memory together, where the features of a row are adjacent.

`python -m tests.emulator.kernels.faults` takes out each wait and arrival of this protocol and shows that it is noticed.
"""

from typing import Any

import torch
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.hopper import gemm_swap_ab_configs as configs
from fusedvit.kernels.hopper.gemm_epilogue import (
    LINES,
    PACKED,
    VECTOR,
    EpilogueArgs,
    activate,
    apply_norm,
    channels_of,
    descriptor,
    epilogue_constants,
    extra_descriptor,
    merge_moments,
    moments_of,
    steps_of,
    store_moments,
    unpack_cos_sin,
    unsupported_operands,
)
from fusedvit.kernels.hopper.gemm_swap_ab_configs import UNIT, UNIT_BYTES, HopperSwapABConfig, unsupported_shape
from fusedvit.kernels.hopper.gluon_compat import (
    async_load,
    async_store,
    barrier,
    built_descriptor,
    gl,
    gluon,
    indexed,
    misplaced_operands,
    record,
    reinterpret,
)
from fusedvit.kernels.launch import Loaded, launch
from fusedvit.kernels.tma import rows_behind


@record
class SwapABShape:
    """Sizes of a launch, known when it is compiled but for the number of steps."""

    steps: gl.tensor  # of 64 in K, see `steps_of`
    STEPS: gl.constexpr
    N: gl.constexpr
    ROWS: gl.constexpr  # rows of x in a tile: columns of a WGMMA
    WIDTH: gl.constexpr  # columns of the accumulator of a chunk: a power of two
    BOX: gl.constexpr  # rows of one TMA copy where 64 are too many
    CONSUMERS: gl.constexpr  # 64 features each
    STAGES: gl.constexpr
    HAS_EXTRA: gl.constexpr  # whether a residual or packed cos/sin follows the operands


@record
class Pipeline:
    """Operands in shared memory: one allocation, at its beginning.

    Units of [64, 64] values: weights of every consumer and stage, then rows of x of every stage, a unit a chunk, and
    behind a norm one more for the moments of the tile's rows.
    """

    units: gl.shared_memory_descriptor  # [STAGES * (CONSUMERS + chunks) (+ 1), 64, 64]
    full: gl.shared_memory_descriptor  # [STAGES, 1] barriers: operands have landed
    empty: gl.shared_memory_descriptor  # [STAGES, 1] barriers: every consumer has read them
    merged: gl.shared_memory_descriptor  # barrier: every consumer has merged its share of the moments


@record
class Descriptors:
    x: tma.tensor_descriptor  # [T, K], BOX rows
    wide: tma.tensor_descriptor  # [T, K], 64 rows
    w: tma.tensor_descriptor  # [N / 16, 2, 8, K]: of 16 rows the even ones, then the odd ones
    out: tma.tensor_descriptor  # [T, N], BOX rows
    extra: tma.tensor_descriptor  # residual [T, N] or packed cos/sin [T, ...], BOX rows


chunks_of = gluon.constexpr_function(configs.chunks_of)
units_of = gluon.constexpr_function(configs.units_of)


@gluon.constexpr_function
def rows_of(rows, chunk):
    """Rows of a chunk."""
    return min(64, rows - 64 * chunk)


@gluon.jit
def _weights(pipe, shape, stage, C: gl.constexpr):
    """Weights of consumer C; at the end its residual or packed cos/sin, then its output."""
    return indexed(pipe.units, shape.STAGES * C, shape.STAGES, stage)


@gluon.jit
def _rows(pipe, shape, stage, H: gl.constexpr):
    """Chunk H of x."""
    CHUNKS: gl.constexpr = chunks_of(shape.ROWS)
    return indexed(pipe.units, shape.STAGES * shape.CONSUMERS, shape.STAGES * CHUNKS, stage * CHUNKS + H)


WEIGHTS_LAYOUT = gl.NVMMASharedLayout(128, 16, 4)  # of 4 x 16 rows, even ones before odd ones
EVEN_ODD = gl.constexpr(WEIGHTS_LAYOUT)
# WGMMA matrix descriptor of rows of 128 bytes, swizzled: eight rows are 1024 bytes from the next eight.
DESCRIPTOR = hex(1 << 62 | (1024 >> 4) << 32 | 1 << 16)


@gluon.constexpr_function
def _step_text(rows, width, consumers, stages, consumer, kind):
    """PTX of a step of K = 64. Operands: registers of the sums, then the stage, once per element of the sums."""
    chunks = chunks_of(rows)
    held = chunks * width // 2
    stage = f"${2 * held}"
    sums = ", ".join(f"${i}" for i in range(rows // 2))
    product = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{kind}.{kind} {{{sums}}}, a, b, more, 1, 1, 0, 0;"
    onward = " add.u64 a, a, 2; add.u64 b, b, 2; "  # 16 values further, in units of 16 bytes
    return f"""{{ .reg .b32 base, at; .reg .b64 a, b; .reg .pred more;
        setp.eq.u32 more, 0, 0;
        mov.u32 base, global_smem;
        mad.lo.u32 at, {stage}, {UNIT_BYTES}, base; add.u32 at, at, {UNIT_BYTES * stages * consumer};
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
    """Constraints: `registers` in and out, and `more` others in."""
    return ",".join(["=f"] * registers + [str(i) for i in range(registers)] + ["r"] * more)


@gluon.jit
def _issue_mma(shape, sums, stage, C: gl.constexpr, dtype: gl.constexpr):
    """Issues the products of one step; they are still running when it returns."""
    EACH: gl.constexpr = shape.WIDTH // 2
    KIND: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    TEXT: gl.constexpr = _step_text(shape.ROWS, shape.WIDTH, shape.CONSUMERS, shape.STAGES, C, KIND)
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
def _wait_mma(shape, sums, STEPS: gl.constexpr):
    """Waits until the products of at most STEPS steps are running."""
    EACH: gl.constexpr = shape.WIDTH // 2
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
def _tile_coords(shape, num_rows):
    """(first row, first column) of this program's tile; a column past the last where it has no rows."""
    num_m = gl.maximum(1, (num_rows + shape.ROWS - 1) // shape.ROWS)
    pid = gl.program_id(0)
    col0 = pid // num_m * (64 * shape.CONSUMERS)
    return pid % num_m * shape.ROWS, gl.where(num_rows > 0, col0, shape.N)


@gluon.jit
def _next_stage(shape, stage, phase):
    """The next stage and the parity of its round: counted, as a division would take longer than a step."""
    last = stage == shape.STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


OUTPUT = gl.constexpr(LINES)
MOMENT_ROWS = gl.constexpr(256)  # rows that there is room for moments of: the shares of all consumers


@gluon.constexpr_function
def share_of(rows, consumers):
    """Rows whose moments each consumer merges: a power of two, so that a row has at most 8 threads, as eight parts have
    that many pairs of moments."""
    return max(16, 1 << (-(-rows // consumers) - 1).bit_length())


@gluon.jit
def _features(x, WIDTH: gl.constexpr):
    """(even, odd) features of a chunk's sums [64, WIDTH]: [32, WIDTH] each."""
    even, odd = x.reshape([4, 2, 8, WIDTH]).permute([0, 2, 3, 1]).split()
    return even.reshape([32, WIDTH]), odd.reshape([32, WIDTH])


@gluon.jit
def _load_parts(epi, rows, start: gl.constexpr, L: gl.constexpr):
    """Parts start ... start + 7 of the statistics of `rows`, unmerged."""
    offs = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, L)), 0)
    ptrs = epi.stats_in_ptr + 2 * start + gl.expand_dims(rows, 1) + offs
    return gl.load(ptrs, mask=offs < 2 * (epi.IN_PARTS - start), other=0.0)


@gluon.jit
def _load_moments(shape, epi, row0, C: gl.constexpr):
    """Loads the statistics of consumer C's share of the tile's rows, eight parts at a time."""
    SHARE: gl.constexpr = share_of(shape.ROWS, shape.CONSUMERS)
    EACH: gl.constexpr = 128 // SHARE if SHARE < 128 else 1  # threads of a row
    L: gl.constexpr = gl.BlockedLayout([1, 16 // EACH], [32 // EACH, EACH], [4, 1], [1, 0])
    found = ()
    if epi.IN_PARTS > 0:
        rows = row0.to(gl.int64) + C * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, L))
        rows = gl.minimum(rows, epi.num_rows - 1) * (2 * epi.IN_PARTS)
        for start in gl.static_range(0, epi.IN_PARTS, 8):
            found = found + (_load_parts(epi, rows, start, L),)  # type: ignore[assignment]  # a tuple that grows
    return found


@gluon.jit
def _merge_parts(epi, both, start: gl.constexpr):
    """(channels, mean, M2) of what `_load_parts` loaded."""
    COUNT: gl.constexpr = both.shape[0]
    PER_LENGTH: gl.constexpr = (epi.IN_LENGTH + epi.IN_WIDTH - 1) // epi.IN_WIDTH
    CHANNELS: gl.constexpr = channels_of(start, 8, epi.IN_PARTS, epi.IN_WIDTH, epi.IN_LENGTH)
    mean, m2 = both.reshape([COUNT, 8, 2]).split()
    part = start + gl.arange(0, 8, gl.SliceLayout(0, mean.type.layout))
    size = gl.minimum(epi.IN_LENGTH - (part % PER_LENGTH) * epi.IN_WIDTH, epi.IN_WIDTH)
    size = gl.expand_dims(gl.where(part < epi.IN_PARTS, size, 0).to(gl.float32), 0)
    total = gl.sum(mean * size, 1) * (1.0 / CHANNELS)
    spread = mean - gl.expand_dims(total, 1)
    return CHANNELS, total, gl.sum(m2 + size * spread * spread, 1)


@gluon.jit
def _moments_smem(shape, pipe, WIDTH: gl.constexpr):
    """Shared memory of the moments, WIDTH rows a line: means of up to MOMENT_ROWS rows, then 1 / std."""
    LAST: gl.constexpr = shape.STAGES * (shape.CONSUMERS + chunks_of(shape.ROWS))
    return reinterpret(pipe.units.index(LAST), gl.float32, [2 * MOMENT_ROWS // WIDTH, WIDTH], VECTOR)


@gluon.jit
def _merge_moments_share(shape, epi, pipe, C: gl.constexpr, parts):
    """Merges this consumer's share into (mean, 1 / sqrt(var + eps)) in shared memory; RMSNorm: (unused, 1 / rms)."""
    if epi.IN_PARTS > 0:
        SHARE: gl.constexpr = share_of(shape.ROWS, shape.CONSUMERS)
        merged = _moments_smem(shape, pipe, SHARE)
        count, mean, m2 = _merge_parts(epi, parts[0], 0)
        for i in gl.static_range(1, len(parts)):
            more, more_mean, more_m2 = _merge_parts(epi, parts[i], 8 * i)
            count, mean, m2 = merge_moments(count, mean, m2, more, more_mean, more_m2)
        square = m2 / count
        if not epi.CENTRED:
            square += mean * mean
        merged.index(C).store(mean)
        merged.index(C + MOMENT_ROWS // SHARE).store(gl.rsqrt(square + epi.EPS))
        barrier()  # every thread's stores come before the one thread's arrival
        mbarrier.arrive(pipe.merged.index(0), count=1)


@gluon.jit
def _await_merged(epi, pipe):
    """Waits until every consumer has merged its share."""
    if epi.IN_PARTS > 0:
        mbarrier.wait(pipe.merged.index(0), 0)


@gluon.jit
def _of_features(ptr, epi, col0, ODD: gl.constexpr, L: gl.constexpr):
    """32 values of a vector from `col0` on, the even or the odd ones; 0 past the last."""
    cols = col0 + ODD + 2 * gl.arange(0, 32, L)
    return gl.load(ptr + cols, mask=cols < epi.N, other=0.0).to(gl.float32)


@gluon.jit
def _load_vectors(epi, col0, L: gl.constexpr):
    """(bias, colsum) of even and odd features, loaded before the main loop, which hides their latency."""
    none = gl.zeros([32], gl.float32, L)
    bias0, bias1, sum0, sum1 = none, none, none, none
    if epi.HAS_BIAS:
        bias0, bias1 = _of_features(epi.bias_ptr, epi, col0, 0, L), _of_features(epi.bias_ptr, epi, col0, 1, L)
    if epi.IN_PARTS > 0 and epi.CENTRED:
        sum0, sum1 = _of_features(epi.colsum_ptr, epi, col0, 0, L), _of_features(epi.colsum_ptr, epi, col0, 1, L)
    return bias0, bias1, sum0, sum1


@gluon.jit
def _read_merged(shape, epi, pipe, H: gl.constexpr, L: gl.constexpr):
    """(mean, 1 / std) of chunk H's rows."""
    mean = gl.zeros([shape.WIDTH], gl.float32, L)
    rstd = mean
    if epi.IN_PARTS > 0:
        kept = _moments_smem(shape, pipe, shape.WIDTH)
        mean = kept.index(H).load(L)
        rstd = kept.index(H + MOMENT_ROWS // shape.WIDTH).load(L)
    return mean, rstd


@gluon.jit
def _pack(even, odd, dtype: gl.constexpr):
    """Two features of a row, rounded, in 32 bits."""
    if dtype == gl.bfloat16:
        TEXT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        TEXT: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"  # type: ignore[no-redef]  # the other branch's is gone
    return gl.inline_asm_elementwise(TEXT, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack_pair(packed, dtype: gl.constexpr):
    """The reverse of `_pack`, as fp32."""
    if dtype == gl.bfloat16:
        TEXT: gl.constexpr = """{ .reg .b32 a; shl.b32 a, $2, 16; mov.b32 $0, a;
            and.b32 a, $2, 0xFFFF0000; mov.b32 $1, a; }"""
    else:
        TEXT: gl.constexpr = (  # type: ignore[no-redef]
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
        )
    return gl.inline_asm_elementwise(
        TEXT, "=f,=f,r", [packed], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _finish(shape, epi, pairs, vectors, pipe, even, odd, col0, H: gl.constexpr, dtype: gl.constexpr):
    """The epilogue of a chunk's (even, odd) features, up to rounding; `pairs` holds the residual or packed cos/sin."""
    P: gl.constexpr = even.type.layout
    bias0, bias1, sum0, sum1 = vectors
    mean, rstd = _read_merged(shape, epi, pipe, H, gl.SliceLayout(0, P))
    even = apply_norm(even, epi, bias0, sum0, mean, rstd, 1)
    odd = apply_norm(odd, epi, bias1, sum1, mean, rstd, 1)
    if epi.ROPE_COLS > 0:
        if col0 < epi.ROPE_COLS:
            cos, sin = unpack_cos_sin(pairs.load(P))
            even, odd = even * cos - odd * sin, odd * cos + even * sin
    even, odd = activate(even, epi.ACT, dtype), activate(odd, epi.ACT, dtype)
    if epi.HAS_RESIDUAL:
        more0, more1 = _unpack_pair(pairs.load(P), dtype)
        even, odd = even + more0, odd + more1
    return even, odd


@gluon.jit
def _store_statistics(shape, epi, lines, row0, col0, H: gl.constexpr):
    """Moments of the 64 rounded features of each row, 128 / WIDTH threads a row."""
    L: gl.constexpr = gl.BlockedLayout([1, shape.WIDTH // 2], [shape.WIDTH // 4, 128 // shape.WIDTH], [4, 1], [1, 0])
    mean, m2 = moments_of(lines.load(L).to(gl.float32))
    inside = 64 * H + gl.arange(0, shape.WIDTH, gl.SliceLayout(1, L))
    rows = row0.to(gl.int64) + inside
    store_moments(mean, m2, epi, rows, (rows < epi.num_rows) & (inside < shape.ROWS), col0 // 64)


@gluon.jit
def _finish_chunk_at(shape, epi, pipe, unit, descs, vectors, x, row0, col0, H: gl.constexpr):
    """Epilogue and store of chunk H, through `unit`, where the residual or packed cos/sin lies."""
    dtype: gl.constexpr = descs.out.dtype
    HERE: gl.constexpr = rows_of(shape.ROWS, H)
    even, odd = _features(x, shape.WIDTH)
    pairs = reinterpret(unit, gl.int32, [shape.WIDTH, 32], PACKED).permute((1, 0))
    even, odd = _finish(shape, epi, pairs, vectors, pipe, even, odd, col0, H, dtype)
    pairs.store(_pack(even, odd, dtype))
    fence_async_shared()
    lines = reinterpret(unit, dtype, [64 // shape.BOX, shape.BOX, 64], OUTPUT)
    for i in gl.static_range(HERE // shape.BOX):
        async_store(descs.out, [row0 + 64 * H + i * shape.BOX, col0], lines.index(i))
    if epi.OUT_WIDTH > 0:
        _store_statistics(shape, epi, reinterpret(unit, dtype, [shape.WIDTH, 64], OUTPUT), row0, col0, H)


@gluon.jit
def _load_weights(shape, pipe, descs, stage, col0, k, dtype: gl.constexpr):
    """Weights of a step; the barrier begins to expect them and x."""
    full = pipe.full.index(stage)
    mbarrier.expect(full, (64 * shape.CONSUMERS + shape.ROWS) * 128)
    for c in gl.static_range(shape.CONSUMERS):
        unit = reinterpret(_weights(pipe, shape, stage, c), dtype, [4, 2, 8, 64], EVEN_ODD)
        col = _inside(col0, 64 * c, shape.N)
        async_load(descs.w, [col // 16, 0, 0, k * 64], full, unit)


@gluon.jit
def _inside(first, behind: gl.constexpr, end):
    """`first + behind`, or `first` where that is past the end: TMA copies from outside a tensor take longer."""
    return gl.where(first + behind < end, first + behind, first)


@gluon.jit
def _load_rows(shape, epi, pipe, descs, stage, row0, k, dtype: gl.constexpr):
    """A step's rows of x."""
    full = pipe.full.index(stage)
    for h in gl.static_range(chunks_of(shape.ROWS)):
        unit = _rows(pipe, shape, stage, h)
        if rows_of(shape.ROWS, h) == 64:
            async_load(descs.wide, [_inside(row0, 64 * h, epi.num_rows), k * 64], full, unit)
        else:
            lines = reinterpret(unit, dtype, [64 // shape.BOX, shape.BOX, 64], OUTPUT)
            for i in gl.static_range(rows_of(shape.ROWS, h) // shape.BOX):
                row = _inside(row0, 64 * h + i * shape.BOX, epi.num_rows)
                async_load(descs.x, [row, k * 64], full, lines.index(i))


@gluon.jit
def _load_extra(shape, epi, pipe, descs, stage, row0, col0, H: gl.constexpr, dtype: gl.constexpr):
    """Residual or packed cos/sin of chunk H, where the weights of each consumer were."""
    PAIRS: gl.constexpr = epi.HEAD_DIM // 2
    HERE: gl.constexpr = rows_of(shape.ROWS, H)
    full = pipe.full.index(stage)
    mbarrier.expect(full, shape.CONSUMERS * HERE * 128)
    for c in gl.static_range(shape.CONSUMERS):
        unit, col = _weights(pipe, shape, stage, c), col0 + 64 * c
        for i in gl.static_range(HERE // shape.BOX):
            row = _inside(row0, 64 * H + i * shape.BOX, epi.num_rows)
            if epi.HAS_RESIDUAL:
                lines = reinterpret(unit, dtype, [64 // shape.BOX, shape.BOX, 64], OUTPUT)
                async_load(descs.extra, [row, col], full, lines.index(i))
            else:
                pairs = reinterpret(unit, gl.int32, [64 // shape.BOX, shape.BOX, 32], PACKED)
                async_load(descs.extra, [row, col // 2 % PAIRS], full, pairs.index(i))


@gluon.jit
def _producer(shape, epi, pipe, descs):
    CHUNKS: gl.constexpr = chunks_of(shape.ROWS)
    dtype: gl.constexpr = pipe.units.dtype
    row0, col0 = _tile_coords(shape, epi.num_rows)
    # The number of stages, hidden from the compiler so that it emits one loop.
    ahead = gl.minimum(epi.num_rows * shape.STAGES, shape.STAGES)
    if col0 < shape.N:
        for k in range(0, ahead):  # while the previous launch still writes x (PDL)
            _load_weights(shape, pipe, descs, k, col0, k, dtype)
        gdc_wait()
        for k in range(0, ahead):
            _load_rows(shape, epi, pipe, descs, k, row0, k, dtype)
        stage, phase = ahead - shape.STAGES, ahead - shape.STAGES
        for k in range(ahead, steps_of(shape)):
            mbarrier.wait(pipe.empty.index(stage), phase)
            _load_weights(shape, pipe, descs, stage, col0, k, dtype)
            _load_rows(shape, epi, pipe, descs, stage, row0, k, dtype)
            stage, phase = _next_stage(shape, stage, phase)
        if shape.HAS_EXTRA:
            for h in gl.static_range(CHUNKS):
                mbarrier.wait(pipe.empty.index(stage), phase)
                _load_extra(shape, epi, pipe, descs, stage, row0, col0, h, dtype)
                stage, phase = _next_stage(shape, stage, phase)


@gluon.jit
def _zeros(shape):
    """A consumer's sums, [64, WIDTH] a chunk."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.WIDTH, 16])
    sums = ()
    for _ in gl.static_range(chunks_of(shape.ROWS)):
        sums = sums + (gl.zeros([64, shape.WIDTH], gl.float32, L),)
    return sums


@gluon.jit
def _main_loop(shape, epi, pipe, parts, C: gl.constexpr):
    """(sums, the stage behind the last step, parity of its round). Moments are merged under the products of the first
    step where registers allow it."""
    UNDER: gl.constexpr = chunks_of(shape.ROWS) < 3
    dtype: gl.constexpr = pipe.units.dtype
    if not UNDER:
        _merge_moments_share(shape, epi, pipe, C, parts)
    before = gl.minimum(epi.num_rows, 0)  # 0, hidden from the compiler
    stage, phase = _next_stage(shape, before, before)
    mbarrier.wait(pipe.full.index(0), 0)
    sums = _issue_mma(shape, _zeros(shape), before, C, dtype)
    if UNDER:
        _merge_moments_share(shape, epi, pipe, C, parts)
    for _ in range(1, steps_of(shape)):
        mbarrier.wait(pipe.full.index(stage), phase)
        sums = _issue_mma(shape, sums, stage, C, dtype)
        sums = _wait_mma(shape, sums, 1)
        mbarrier.arrive(pipe.empty.index(before), count=1)
        before = stage
        stage, phase = _next_stage(shape, stage, phase)
    sums = _wait_mma(shape, sums, 0)
    mbarrier.arrive(pipe.empty.index(before), count=1)
    return sums, stage, phase


@gluon.jit
def _consumer(shape, epi, pipe, descs, C: gl.constexpr):
    row0, tile_col0 = _tile_coords(shape, epi.num_rows)
    col0 = tile_col0 + 64 * C
    even, _ = _features(_zeros(shape)[0], shape.WIDTH)
    vectors = _load_vectors(epi, col0, gl.SliceLayout(1, even.type.layout))
    gdc_wait()
    if tile_col0 < shape.N:
        parts = _load_moments(shape, epi, row0, C)
        sums, stage, phase = _main_loop(shape, epi, pipe, parts, C)
        _await_merged(epi, pipe)
        for h in gl.static_range(chunks_of(shape.ROWS)):
            if shape.HAS_EXTRA:
                mbarrier.wait(pipe.full.index(stage), phase)
            if col0 < shape.N:
                unit = _weights(pipe, shape, stage, C)
                _finish_chunk_at(shape, epi, pipe, unit, descs, vectors, sums[h], row0, col0, h)
            stage, phase = _next_stage(shape, stage, phase)
        tma.store_wait(0)


@gluon.jit
def _consumer_0(shape, epi, pipe, descs):
    _consumer(shape, epi, pipe, descs, 0)


@gluon.jit
def _consumer_1(shape, epi, pipe, descs):
    _consumer(shape, epi, pipe, descs, 1)


@gluon.jit
def _consumer_2(shape, epi, pipe, descs):
    _consumer(shape, epi, pipe, descs, 2)


@gluon.jit
def _consumer_3(shape, epi, pipe, descs):
    _consumer(shape, epi, pipe, descs, 3)


@gluon.jit(do_not_specialize=["steps"])
def _hopper_swap_ab_kernel(
    x_desc,  # [T, K]
    wide_desc,  # [T, K]
    w_desc,  # [N / 16, 2, 8, K]
    out_desc,  # [T, N]
    extra_desc,  # residual [T, N] or packed cos/sin [T, W]; any descriptor if neither
    bias_ptr,
    colsum_ptr,
    stats_in_ptr,
    stats_out_ptr,
    num_rows_ptr,  # [1] int32: the true T
    steps,  # of 64 in K
    STEPS: gl.constexpr,
    N: gl.constexpr,
    EPS: gl.constexpr,
    IN_PARTS: gl.constexpr,
    IN_WIDTH: gl.constexpr,
    IN_LENGTH: gl.constexpr,
    ROPE_COLS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_PARTS: gl.constexpr,
    TAPS: gl.constexpr,
    ACT: gl.constexpr,
    LIMIT: gl.constexpr,
    CENTRED: gl.constexpr,
    HAS_CLIP: gl.constexpr,
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
    num_rows = gl.load(num_rows_ptr)  # first: which tiles there are depends on it
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    UNITS: gl.constexpr = units_of(chunks_of(ROWS), CONSUMERS, STAGES, IN_PARTS > 0)
    units = gl.allocate_shared_memory(x_desc.dtype, [UNITS, 64, 64], OUTPUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    merged = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    if IN_PARTS > 0:
        mbarrier.init(merged.index(0), count=CONSUMERS)
    for i in gl.static_range(STAGES):  # interleaved: Triton puts a CTA barrier between two inits of one array
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    gdc_launch_dependents()

    shape = SwapABShape(steps, STEPS, N, ROWS, WIDTH, BOX, CONSUMERS, STAGES, HAS_RESIDUAL or ROPE_COLS > 0)
    epi = EpilogueArgs(
        bias_ptr, colsum_ptr, stats_in_ptr, num_rows_ptr, num_rows_ptr, num_rows_ptr, stats_out_ptr, num_rows_ptr,
        num_rows, N, EPS, IN_PARTS, CENTRED, IN_WIDTH, IN_LENGTH, ROPE_COLS, HEAD_DIM, HEAD_PARTS, TAPS, ACT, LIMIT,
        HAS_CLIP, HAS_BIAS, HAS_RESIDUAL, OUT_WIDTH,
    )  # fmt: skip
    pipe = Pipeline(units, full, empty, merged)
    descs = Descriptors(x_desc, wide_desc, w_desc, out_desc, extra_desc)
    args = (shape, epi, pipe, descs)
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


_checked: set[Loaded] = set()  # compiled kernels whose pipeline begins where shared memory does


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
        RuntimeError: this Triton puts the pipeline elsewhere, so the output of this launch is wrong.
    """
    (rows, k), n = x.shape, weight.shape[0]
    e = epilogue
    reason = unsupported(e, x, n, config)
    if reason:
        raise ValueError(f"the swap-AB GEMM takes {reason}")
    assert weight.shape[1] == k and out.shape == (rows, n), f"x {x.shape}, weight {weight.shape}, out {out.shape}"
    pointers = *e.vectors(), e.moments_out()
    loaded = launch(
        _hopper_swap_ab_kernel,
        config.tiles(rows, n),
        _descriptors(x, weight, out, e, config),
        tuple(num_rows if p is None else p for p in pointers) + (num_rows,),
        epilogue_constants(n, k, e, e.residual is not None and config.rows > UNIT) | config.constants(),
        config.options(),
        (-(-k // UNIT),),
    )
    if loaded is not None and loaded not in _checked:
        said = misplaced_operands(loaded.ptx(), config.pipeline_bytes(e.norm is not None))
        if said:
            raise RuntimeError(said)
        _checked.add(loaded)
    return out


def unsupported(e: Epilogue, x: torch.Tensor, n: int, config: HopperSwapABConfig) -> str:
    """Why this backend cannot run the product and its epilogue, or ""."""
    if e.gated or e.taps is not None or e.heads is not None:
        return "no gated activation, no position taps and no norms of heads"
    if e.stats is not None and (e.stats.width != config.block_n or n % config.block_n):
        return f"statistics of whole {config.block_n}s in parts of as many, got {n} in parts of {e.stats.width}"
    return unsupported_operands(e, x) or unsupported_shape(n, x.shape[1], config.stages)


def _descriptors(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, e: Epilogue, config: HopperSwapABConfig
) -> tuple[Any, ...]:
    box, tile = config.box, config.rows
    out_desc = descriptor(out, box)
    x_descs = descriptor(x, box, tile=tile), descriptor(x, UNIT, tile=tile)
    return *x_descs, _weights_descriptor(weight, config.cols), out_desc, extra_descriptor(e, box, tile) or out_desc


def _weights_descriptor(weight: torch.Tensor, tile: int) -> Any:
    """Descriptor of blocks of 64 rows of weights, of every 16 the even ones before the odd ones."""
    n, k = rows_behind(weight, tile), weight.shape[1]
    pitch = weight.stride(0)
    strides = [16 * pitch, pitch, 2 * pitch, 1]
    return built_descriptor(weight, [n // 16, 2, 8, k], strides, [4, 2, 8, 64], WEIGHTS_LAYOUT)
