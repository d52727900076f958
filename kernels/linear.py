"""Every linear layer of the encoder: one persistent GEMM whose epilogue applies what follows the product.

    acc[t, n] = sum_k x[t, k] w[n, k]                                            fp32 accumulation
    norm      : acc = rstd[t] (acc - mean[t] colsum[n])                          LayerNorm, folded into w
                acc = acc / rms[t]                                               RMSNorm, likewise
    bias      : acc += bias[n]
    taps      : acc += sum_i tap_weight[t, i] table[tap_index[t, i], n]          learned positions, interpolated
    heads     : acc = clamp(acc) / rms(its head) weight[n % 64]                  heads of 64 of q and k, perhaps of v
    rope      : (a, b) = acc[t, 2i:2i+2] -> (a cos - b sin, b cos + a sin)       q and k columns, pairs made neighbours
    act       : gelu_tanh | gelu | quick_gelu
                (g, u) = acc[t, 2i:2i+2] -> silu(g) u                            swiglu, half as many columns
                                         -> clamp(gelu_tanh(clamp(g)) clamp(u))  geglu_tanh, likewise
    residual  : acc += residual[t, n]
    out       = acc rounded; moments of the rounded rows, one part per tile      RowStats

The row count is read from device memory: programs loop over the tiles that hold rows and exit, so that the time of a
captured launch depends on the row count, not on the capacity. Rows past the count do not affect other rows.

Split-K: a tile's K is cut into parts, one per program. A program writes its partial sums to scratch memory and
increments a counter; the last program of a tile adds all parts and applies the epilogue. It adds them in the same order
whichever program it is, so that the bits are the same every time. No program waits.

    sums     : [tile, part, BLOCK_M, BLOCK_N] fp32
    counters : [tile] int32, parts that are written; 0 before and after a launch
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedvit.kernels.epilogue import (
    HEAD_WIDTH,
    Epilogue,
    Rope,
    Scratch,
    activate,
    add_taps,
    gate_pairs,
    merge_moments,
    merge_squares,
    normalise_heads,
    rotate_pairs,
    store_moments,
)
from fusedvit.kernels.launch import launch
from fusedvit.kernels.tile_configs import LinearConfig
from fusedvit.kernels.tma import descriptor

GROUP_M = tl.constexpr(8)  # tile rows that are walked together; with 4 or 16 towers take as long within 1 %


@triton.jit
def _tile_of(t, num_m, NUM_N: tl.constexpr):
    """Tile index -> (tile row, tile column), GROUP_M tile rows at a time so that weights stay in L2."""
    group = t // (GROUP_M * NUM_N)
    size = tl.minimum(num_m - group * GROUP_M, GROUP_M)
    inside = t % (GROUP_M * NUM_N)
    return group * GROUP_M + inside % size, inside // size


@triton.jit
def _product(x_desc, w_desc, row0, col0, k0, k1, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """x w^T of a tile over K from k0 to k1, [BLOCK_M, BLOCK_N] fp32."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(k0, k1, BLOCK_K):
        x = x_desc.load([row0, k])
        w = w_desc.load([col0, k])
        if x_desc.dtype == tl.float32:  # summed block by block: one running sum over K loses a quarter more
            acc = tl.fma(tl.dot(x, w.T, input_precision="ieee"), 1.0, acc)
        else:
            acc = tl.dot(x, w.T, acc)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N]
    return acc


@triton.jit
def _load_norm_and_bias(
    stats_in_ptr,
    colsum_ptr,
    bias_ptr,
    rows,
    mask_m,
    cols,
    mask_n,
    EPS: tl.constexpr,
    IN_PARTS: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    IN_LENGTH: tl.constexpr,
):
    """(mean, rstd) of a tile's rows and (colsum, bias) of its columns; a neutral number for what is absent."""
    mean, rstd, colsum, bias = 0.0, 1.0, 0.0, 0.0
    if stats_in_ptr is not None:
        if colsum_ptr is not None:
            mean, rstd = merge_moments(stats_in_ptr, rows, mask_m, EPS, IN_PARTS, IN_WIDTH, IN_LENGTH, 16)
            colsum = tl.load(colsum_ptr + cols, mask=mask_n, other=0.0)
        else:
            rstd = merge_squares(stats_in_ptr, rows, mask_m, EPS, IN_PARTS, IN_WIDTH, IN_LENGTH, 16)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=mask_n, other=0.0).to(tl.float32)
    return mean, rstd, colsum, bias


@triton.jit
def _reduce_parts(
    acc,  # [BLOCK_M, BLOCK_N] fp32, this program's part
    sums_ptr,  # [tiles, SPLITS, BLOCK_M, BLOCK_N] fp32
    counters_ptr,  # [tiles] int32
    tile,
    part,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(sum of all parts, True) in a tile's last program; (undefined, False) in the others."""
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    ptrs = sums_ptr + tile.to(tl.int64) * (SPLITS * SIZE)
    ptrs += tl.arange(0, BLOCK_M)[:, None].to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(ptrs + part.to(tl.int64) * SIZE, acc)
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    last = tl.atomic_add(counters_ptr + tile, 1) == SPLITS - 1
    if last:
        tl.store(counters_ptr + tile, 0)  # for the next launch
        acc = tl.load(ptrs, cache_modifier=".cg")
        for _ in tl.range(1, SPLITS):  # one at a time, as registers allow
            ptrs += SIZE
            acc += tl.load(ptrs, cache_modifier=".cg")
    return acc, last


@triton.jit
def _linear_kernel(
    x_desc,  # [T, K]; this and the next three are descriptors, or pointers where X_PITCH > 0
    w_desc,  # [N, K]
    out_desc,  # [T, N]; of gated activations [T, N / 2]
    residual_desc,  # [T, N] or None
    bias_ptr,  # [N] or None
    colsum_ptr,  # [N] fp32; None for an RMSNorm
    stats_in_ptr,  # [T, IN_PARTS, 2] fp32 or None
    rope_ptr,  # [T, PACKED_COLS] int32, or [T, 2, HEAD_DIM / 2] fp32, or None
    table_ptr,  # [positions, N] or None
    tap_index_ptr,  # [T, TAPS] int32
    tap_weight_ptr,  # [T, TAPS] fp32
    stats_out_ptr,  # [T, ceil(N / BLOCK_N), 2] fp32 or None
    clip_ptr,  # of gated activations [3, 2], of heads [HEAD_PARTS, 2] fp32; or None
    head_norm_ptr,  # [HEAD_PARTS, HEAD] or None
    sums_ptr,  # [tiles, SPLITS, BLOCK_M, BLOCK_N] fp32; None if SPLITS is 1, like the next
    counters_ptr,  # [tiles] int32
    num_rows_ptr,  # [1] int32: the true T
    N: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    IN_PARTS: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    IN_LENGTH: tl.constexpr,
    ROPE_COLS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    TAPS: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    PACKED_COLS: tl.constexpr,
    X_PITCH: tl.constexpr,
    W_PITCH: tl.constexpr,
    OUT_PITCH: tl.constexpr,
    RESIDUAL_PITCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    NUM_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GATED: tl.constexpr = ACT == "swiglu" or ACT == "geglu_tanh"
    FACTORS: tl.constexpr = 2 if GATED else 1  # columns of the product to one of the output
    HOIST: tl.constexpr = SPLITS == 1 and table_ptr is None  # split-K and taps have no registers for it
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_rows = tl.load(num_rows_ptr)
    if X_PITCH > 0:
        x_desc = tl.make_tensor_descriptor(x_desc, [num_rows, K], [X_PITCH, 1], [BLOCK_M, BLOCK_K])
        w_desc = tl.make_tensor_descriptor(w_desc, [N, K], [W_PITCH, 1], [BLOCK_N, BLOCK_K])
        out_desc = tl.make_tensor_descriptor(
            out_desc, [num_rows, N // FACTORS], [OUT_PITCH, 1], [BLOCK_M, BLOCK_N // FACTORS]
        )
        if residual_desc is not None:
            residual_desc = tl.make_tensor_descriptor(
                residual_desc, [num_rows, N], [RESIDUAL_PITCH, 1], [BLOCK_M, BLOCK_N]
            )
    num_m = tl.cdiv(num_rows, BLOCK_M)
    for item in tl.range(tl.program_id(0), num_m * NUM_N * SPLITS, tl.num_programs(0)):
        tile = item // SPLITS
        part = item % SPLITS
        tile_m, tile_n = _tile_of(tile, num_m, NUM_N)
        row0 = tile_m * BLOCK_M
        col0 = tile_n * BLOCK_N
        rows = row0 + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = rows < num_rows
        cols = col0 + tl.arange(0, BLOCK_N)
        mask_n = cols < N
        if HOIST:  # the K loop hides their latency
            mean, rstd, colsum, bias = _load_norm_and_bias(
                stats_in_ptr, colsum_ptr, bias_ptr, rows, mask_m, cols, mask_n, EPS, IN_PARTS, IN_WIDTH, IN_LENGTH
            )

        k0 = part * NUM_K // SPLITS * BLOCK_K
        k1 = tl.minimum((part + 1) * NUM_K // SPLITS * BLOCK_K, K)
        acc = _product(x_desc, w_desc, row0, col0, k0, k1, BLOCK_M, BLOCK_N, BLOCK_K)
        complete = True
        if SPLITS > 1:
            acc, complete = _reduce_parts(acc, sums_ptr, counters_ptr, tile, part, SPLITS, BLOCK_M, BLOCK_N)
        if complete:
            if not HOIST:
                mean, rstd, colsum, bias = _load_norm_and_bias(
                    stats_in_ptr, colsum_ptr, bias_ptr, rows, mask_m, cols, mask_n, EPS, IN_PARTS, IN_WIDTH, IN_LENGTH
                )
            if stats_in_ptr is not None:
                if colsum_ptr is not None:
                    acc = acc - mean[:, None] * colsum[None, :]
                acc = rstd[:, None] * acc
            if bias_ptr is not None:
                acc += bias[None, :]
            if table_ptr is not None:
                acc = add_taps(acc, table_ptr, tap_index_ptr, tap_weight_ptr, rows, mask_m, cols, mask_n, N, TAPS)
            if HEAD_PARTS > 0:
                if col0 < HEAD_PARTS * (N // 3):
                    acc = normalise_heads(acc, head_norm_ptr, clip_ptr, col0, N, EPS, HEAD_PARTS, BLOCK_M, BLOCK_N)
            if rope_ptr is not None:
                if col0 < ROPE_COLS:
                    acc = rotate_pairs(
                        acc, rope_ptr, rows, mask_m, col0, ROPE_COLS, HEAD_DIM, PACKED_COLS, BLOCK_M, BLOCK_N
                    )
            if GATED:
                y = gate_pairs(acc, clip_ptr, ACT, LIMIT, BLOCK_M, BLOCK_N)
            else:
                y = activate(acc, ACT)
            if residual_desc is not None:
                y += residual_desc.load([row0, col0]).to(tl.float32)

            out = y.to(out_desc.dtype)
            out_desc.store([row0, col0 // FACTORS], out)
            if stats_out_ptr is not None:
                size = tl.minimum(N - col0, BLOCK_N)
                store_moments(out.to(tl.float32), stats_out_ptr, rows, mask_m, mask_n, tile_n, size, NUM_N)


_NO_ROPE = Rope()
_NO_PITCHES = dict.fromkeys(("X_PITCH", "W_PITCH", "OUT_PITCH", "RESIDUAL_PITCH"), 0)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    config: LinearConfig,
) -> torch.Tensor:
    """`out[:num_rows] = epilogue(x[:num_rows] @ weight.T)`; rows past `num_rows` are left undefined.

    Args:
        x: `[T, K]`, row stride a multiple of 16 bytes.
        weight: `[N, K]`, same dtype, row stride a multiple of 16 bytes.
        num_rows: `[1]` int32 on the device, the true row count (at most T).
        out: `[T, N]`, with a gated activation `[T, N / 2]`; may be the residual itself.
        epilogue: the steps after the product; split-K needs its `scratch`.
        config: tile and schedule.

    Raises:
        ValueError: too little scratch for split-K; tiles that cut a normalised head.
    """
    (rows, k), n, e = x.shape, weight.shape[0], epilogue
    if e.heads is not None and (config.block_n % HEAD_WIDTH or n % (3 * HEAD_WIDTH)):
        raise ValueError(f"tiles must have whole heads of {HEAD_WIDTH}, got {config.block_n} of {n} columns")
    wide = n // 2 if e.gated else n
    assert weight.shape[1] == k and out.shape == (rows, wide), f"x {x.shape}, weight {weight.shape}, out {out.shape}"
    assert e.stats is None or e.stats.width == config.block_n, (
        f"row statistics are one part per tile: expected width {config.block_n}, got {e.stats.width}"
    )
    tiles = config.tiles(rows, n)
    if tiles == 0:
        return out
    if triton.knobs.runtime.interpret:  # the interpreter has no such launch option
        config = replace(config, pdl=False)
    factors, packed_cols = (e.rope or _NO_ROPE).factors(x.dtype)
    head_norm = None if e.heads is None else e.heads.weight
    own = (*e.vectors(), factors, *e.tap_tensors(), e.moments_out(), e.bounds, head_norm)
    launch(
        _linear_kernel,
        min(tiles * config.splits, config.max_programs),
        _descriptors(x, weight, out, e, config),
        (*own, *_split_scratch(e.scratch, rows, n, config), num_rows),
        e.constants(n, k)
        | {"PACKED_COLS": packed_cols}
        | _pitches(x, weight, out, e.residual, config.copy_engine)
        | config.constants(),
        config.options(),
    )
    return out


def _split_scratch(
    scratch: Scratch | None, rows: int, n: int, config: LinearConfig
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(sums, counters) of a split-K GEMM of `rows` rows and `n` columns; (None, None) without split-K."""
    if config.splits == 1:
        return None, None
    sums, counters = config.scratch_sizes(rows, n)
    if scratch is None or scratch.sums.numel() < sums or scratch.counters.numel() < counters:
        got = "none" if scratch is None else f"{scratch.sums.numel()} and {scratch.counters.numel()}"
        raise ValueError(f"split-K takes scratch for {sums} sums and {counters} counters, got {got}")
    return scratch.sums, scratch.counters


def _descriptors(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, e: Epilogue, config: LinearConfig
) -> tuple[TensorDescriptor | torch.Tensor | None, ...]:
    bm, bn, bk, engine = config.block_m, config.block_n, config.block_k, config.copy_engine
    out_desc = descriptor(out, bm, bn // 2 if e.gated else bn, engine)
    residual_desc = None
    if e.residual is not None:
        residual_desc = out_desc if e.residual is out else descriptor(e.residual, bm, bn, engine)
    return descriptor(x, bm, bk, engine), descriptor(weight, bn, bk, engine), out_desc, residual_desc


def _pitches(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, copy_engine: bool
) -> dict[str, int]:
    """Elements from row to row, if the kernel builds the descriptors itself; else zeros."""
    if copy_engine:
        return _NO_PITCHES
    pitches = (0 if t is None else t.stride(0) for t in (x, weight, out, residual))
    return dict(zip(_NO_PITCHES, pitches, strict=True))
