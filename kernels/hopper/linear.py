"""`kernels.linear` for Hopper, in Gluon: a producer warp, two or three consumer warpgroups, a persistent walk of tiles.

The formula is that of `kernels.linear`, which is this function's twin. What differs is who waits for whom:

    producer : x and w of a k-step -> the ring (TMA; a `full` and an `empty` barrier a stage);
               residual or rotary words -> staging
    consumer : ring -> WGMMA -> epilogue, a chunk of 64 columns at a time -> staging -> TMA store

Ping-pong (one consumer a tile): the CTA's tiles alternate between two consumers over one ring, which they drain in tile
order: `turn` lets a consumer begin once the other has issued all of its tile's products. One's epilogue runs under the
other's main loop; and nobody is ever two rounds of the ring behind, which keeps barrier parities unambiguous.
Cooperative (2 or 3 consumers a tile): each has its own rows of x, and they share w.
Split: several CTAs a tile, each with a part of K (see linear_split.py).

tests/kernels/hopper_linear_protocol.py runs this protocol in plain Python under random interleaving.
"""

from typing import Any

import torch
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from fusedvit.kernels.descriptor import rows_behind
from fusedvit.kernels.epilogue import Epilogue, NormFold, Rope, Scratch, Taps
from fusedvit.kernels.hopper.compat import TensorDescriptor, gl, gluon
from fusedvit.kernels.hopper.linear_configs import CHUNK, HopperLinearConfig
from fusedvit.kernels.hopper.linear_consumer import _consumer
from fusedvit.kernels.hopper.linear_epilogue import Tail
from fusedvit.kernels.hopper.linear_parts import VECTOR, Boxes, Form, Ring, Split, Staging, _vector_width, _warpgroups
from fusedvit.kernels.hopper.linear_producer import _producer
from fusedvit.kernels.launch import launch


@gluon.jit
def _consumer_0(form, tail, split, ring, staging, boxes):
    _consumer(form, tail, split, ring, staging, boxes, 0)


@gluon.jit
def _consumer_1(form, tail, split, ring, staging, boxes):
    _consumer(form, tail, split, ring, staging, boxes, 1)


@gluon.jit
def _consumer_2(form, tail, split, ring, staging, boxes):
    _consumer(form, tail, split, ring, staging, boxes, 2)


@gluon.jit
def _hopper_linear_kernel(
    x_desc,  # [T, K]
    w1_desc,  # [N, K]
    w2_desc,  # [N, K]
    out_desc,  # [T, N]; of swiglu [T, N / 2]
    extra_desc,  # residual [T, N] or rotary words [T, W]; a stand-in where there is neither
    bias_ptr,
    colsum_ptr,
    stats_in_ptr,
    table_ptr,
    tap_index_ptr,
    tap_weight_ptr,
    stats_out_ptr,
    partials_ptr,
    counters_ptr,
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
    BM: gl.constexpr,
    BN1: gl.constexpr,
    BN2: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUP_M: gl.constexpr,
    X_IN_REGISTERS: gl.constexpr,
):
    num_rows = gl.load(num_rows_ptr)  # first, as all tiles hang on it
    WARPGROUPS: gl.constexpr = _warpgroups(CONSUMERS)
    CHUNKS: gl.constexpr = (BN1 + BN2) // 64
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = x_desc.dtype
    x = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, BM, 64], x_desc.layout)
    w1 = gl.allocate_shared_memory(dtype, [STAGES, BN1, 64], w1_desc.layout)
    w2 = w1
    if BN2 > 0:
        w2 = gl.allocate_shared_memory(dtype, [STAGES, BN2, 64], w2_desc.layout)
    OUT_COLS: gl.constexpr = 32 if ACT == "swiglu" else 64  # of a chunk of 64
    chunks = gl.allocate_shared_memory(dtype, [WARPGROUPS * CHUNKS, BM, OUT_COLS], out_desc.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [2 * WARPGROUPS, _vector_width(BN1 + BN2)], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    staged = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    unstaged = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    # In turns, as Triton has the CTA meet between two of one array. Those that nobody waits at must not be initialised:
    # see `sass.overwritten_barriers`.
    for i in gl.static_range(STAGES if STAGES > WARPGROUPS else WARPGROUPS):
        if i < STAGES:
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=CONSUMERS)
        if i < WARPGROUPS:
            mbarrier.init(unstaged.index(i), count=1)
        if i < WARPGROUPS and (HAS_RESIDUAL or ROPE_COLS > 0):
            mbarrier.init(staged.index(i), count=1)
        if i < 2 and CONSUMERS == 1:
            mbarrier.init(turn.index(i), count=1)
    gdc_launch_dependents()

    form = Form(N, K, BM, BN1, BN2, CONSUMERS, STAGES, SPLITS, GROUP_M, X_IN_REGISTERS)
    tail = Tail(
        bias_ptr, colsum_ptr, stats_in_ptr, table_ptr, tap_index_ptr, tap_weight_ptr, stats_out_ptr,
        num_rows, N, EPS, IN_PARTS, CENTRED, IN_WIDTH, IN_LENGTH, ROPE_COLS, HEAD_DIM, TAPS, ACT, LIMIT, HAS_BIAS,
        HAS_RESIDUAL, OUT_WIDTH,
    )  # fmt: skip
    split = Split(partials_ptr, counters_ptr)
    ring = Ring(x, w1, w2, full, empty)
    staging = Staging(chunks, staged, unstaged, turn, vectors)
    boxes = Boxes(x_desc, w1_desc, w2_desc, out_desc, extra_desc)
    args = (form, tail, split, ring, staging, boxes)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [(_consumer_0, args), (_consumer_1, args), (_consumer_2, args), (_producer, args)],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize([(_consumer_0, args), (_consumer_1, args), (_producer, args)], [4, 1], [232, 40])


_NO_NORM, _NO_ROPE, _NO_TAPS = NormFold(), Rope(), Taps()


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    config: HopperLinearConfig,
) -> torch.Tensor:
    """See `kernels.linear.linear`. A split product needs `epilogue.scratch`.

    Raises:
        ValueError: what `unsupported` says, before any launch.
    """
    (rows, k), n = x.shape, weight.shape[0]
    e = epilogue
    reason = unsupported(e, x, n, config)
    if reason:
        raise ValueError(f"linear in its hopper form takes {reason}")
    wide = n // 2 if e.gated else n
    assert weight.shape[1] == k and out.shape == (rows, wide), f"x {x.shape}, weight {weight.shape}, out {out.shape}"
    tiles = config.tiles(rows, n)
    if tiles == 0:
        return out
    norm, rope, taps = e.norm or _NO_NORM, e.rope or _NO_ROPE, e.taps or _NO_TAPS
    launch(
        _hopper_linear_kernel,
        min(tiles, config.max_programs) if config.splits == 1 else tiles * config.splits,
        _boxes(x, weight, out, e, config),
        tuple(num_rows if p is None else p for p in _pointers(e, norm, taps, config)) + (num_rows,),
        _constants(n, k, e, norm, rope, taps) | config.constants(),
        config.options(),
    )
    return out


def unsupported(e: Epilogue, x: torch.Tensor, n: int, config: HopperLinearConfig) -> str:
    """Why this product and what follows it cannot run here, or ""."""
    steps = -(-x.shape[1] // CHUNK) // config.splits
    if e.gated and (n % 16 or e.rope is not None or e.taps is not None):
        return f"swiglu of whole 16s of columns, without rotary factors or taps, got {n}"
    if steps < 2:
        return f"at least two steps of {CHUNK} in K a part, got {steps}"
    if e.stats is not None and (e.stats.width != config.block_n or n % CHUNK):
        return f"statistics of whole {CHUNK}s in parts of {config.block_n}, got {n} in parts of {e.stats.width}"
    if config.splits > 1:
        sums, counters = config.scratch_sizes(x.shape[0], n)
        if e.scratch is None or e.scratch.sums.numel() < sums or e.scratch.counters.shape[1] < counters:
            return f"scratch for {sums} sums and {counters} counters, got {_size(e.scratch)}"
    return unsupported_operands(e, x)


def unsupported_operands(e: Epilogue, x: torch.Tensor) -> str:
    """What neither form in Gluon takes, or ""."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"operands of 16 bits only, got {x.dtype}"
    if e.rope is not None and e.rope.words is None:
        return "rotary factors as words (see rope_words.py), got none"
    if e.rope is not None and (e.rope.cols % CHUNK or e.residual is not None):
        return f"rotary columns of whole {CHUNK}s and no residual, got {e.rope.cols}"
    return ""


def _size(scratch: Scratch | None) -> str:
    return "none" if scratch is None else f"{scratch.sums.numel()} and {scratch.counters.shape[1]}"


def _pointers(e: Epilogue, norm: NormFold, taps: Taps, config: HopperLinearConfig) -> tuple[torch.Tensor | None, ...]:
    """What the kernel reads and writes by itself; for None there is a stand-in, never read."""
    scratch = e.scratch if config.splits > 1 else None
    return (
        e.bias,
        norm.colsum,
        None if norm.stats is None else norm.stats.partials,
        taps.table,
        taps.index,
        taps.weight,
        None if e.stats is None else e.stats.partials,
        None if scratch is None else scratch.sums,
        None if scratch is None else scratch.counters[(config.splits - 1).bit_length()],
    )


def _boxes(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, e: Epilogue, config: HopperLinearConfig
) -> tuple[Any, ...]:
    wide, narrow = config.accumulators
    rows, tile = config.rows, config.block_m
    out_box = _box(out, rows, _HALF if e.gated else _LAYOUT)
    return (
        _box(x, rows, tile=tile),
        _box(weight, wide, tile=config.cols),
        _box(weight, narrow or wide, tile=config.cols),
        out_box,
        _extra_box(e, rows, tile) or out_box,
    )


def _extra_box(e: Epilogue, rows: int, tile: int) -> Any:
    """Residual or rotary words, `rows` rows at a time, in tiles of `tile`; None where there is neither."""
    if e.rope is not None and e.rope.words is not None:
        return _box(e.rope.words, rows, _WORDS, tile)
    return None if e.residual is None else _box(e.residual, rows, tile=tile)


_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)  # 128 bytes a row, swizzled
_HALF = gl.NVMMASharedLayout(64, 16, 2)
_WORDS = gl.NVMMASharedLayout(128, 32, 2)


def _box(t: torch.Tensor, rows: int, layout: Any = _LAYOUT, tile: int = 1) -> Any:
    """As `descriptor.box`, for Gluon: `rows` rows as wide as the layout's swizzle; products read 128 bytes. Of what is
    read in whole tiles of `tile` rows: see `rows_behind`."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = t
    descriptor.shape = [rows_behind(t, tile), t.shape[1]]
    descriptor.strides = t.stride()
    descriptor.block_shape = [rows, layout.swizzle_byte_width // t.element_size()]
    descriptor.layout = layout
    return descriptor


def _constants(n: int, k: int, e: Epilogue, norm: NormFold, rope: Rope, taps: Taps) -> dict[str, int | float | str]:
    """The compile-time arguments that come from shapes and the epilogue."""
    stats = norm.stats
    return {
        "N": n,
        "K": k,
        "EPS": norm.eps,
        "IN_PARTS": 0 if stats is None else stats.parts,
        "CENTRED": norm.colsum is not None,
        "IN_WIDTH": 1 if stats is None else stats.width,
        "IN_LENGTH": 1 if stats is None else stats.length,
        "ROPE_COLS": rope.cols,
        "HEAD_DIM": rope.head_dim,
        "TAPS": 0 if taps.index is None else taps.index.shape[1],
        "ACT": e.activation,
        "LIMIT": e.limit,
        "HAS_BIAS": e.bias is not None,
        "HAS_RESIDUAL": e.residual is not None,
        "OUT_WIDTH": 0 if e.stats is None else e.stats.width,
    }
