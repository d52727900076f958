"""Varlen attention over packed q | k | v rows, without a mask: each segment (a frame, or a window) attends to itself.

    out[t, h] = sum_j p[t, j] v[j, h] / sum_j p[t, j],   p[t, j] = 2^(q[t, h] . k[j, h])     j over t's segment
    out       = clamp(out)                                                                   if there are bounds

This is softmax where q comes scaled by `query_scale`, which the weights of the qkv GEMM hold already.

Online softmax in base 2, fp32. A head_dim that is no power of two is split in two products (72 = 64 + 16 with 8 columns
to spare, 80 = 64 + 16): padding it to 128 would waste 44 % of the tensor cores' work. The tail of a 72-wide head reads
8 columns of the next head: q's are zeroed once, so that they add nothing to q . k, and v's are not stored.

Work is a list of query tiles built on the device (metadata.py); programs loop over tiles x heads.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusedvit.kernels.epilogue import clamp
from fusedvit.kernels.launch import launch
from fusedvit.kernels.tile_configs import AttentionConfig, split_head
from fusedvit.kernels.tma import descriptor


@dataclass(frozen=True)
class Segments:
    """Which tokens attend to each other, on the device.

    Attributes:
        cu_seqlens: `[frames + 1]` int32, first token of each frame; entries past the true count repeat the total.
        tiles: `[tile capacity, 4]` int32: first token of the frame, one past its last, first query of the tile, 0.
        num_tiles: `[1]` int32, the true number of tiles.
        block_m: queries of a tile.
        above, up_to: only frames of more than `above` and at most `up_to` tokens have tiles.
    """

    cu_seqlens: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    block_m: int
    above: int = 0
    up_to: int = 2**31 - 1


@triton.jit
def _scores(q, q_tail, kv_desc, kv_tail_desc, j, col_k, TAIL: tl.constexpr, HEAD: tl.constexpr):
    """q k^T of one key block, [BLOCK_M, BLOCK_N] fp32."""
    s = tl.dot(q, kv_desc.load([j, col_k]).T, input_precision="ieee")
    if TAIL > 0:
        s = tl.dot(q_tail, kv_tail_desc.load([j, col_k + HEAD]).T, s, input_precision="ieee")
    return s


@triton.jit
def _softmax_step(s, m, l):
    """One online step: (probabilities, rescale factor, new max, new sum)."""
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def _add_product(acc, p, v):
    """acc + p v: [BLOCK_M, BLOCK_N] @ [BLOCK_N, HEAD or TAIL]. In fp32 block by block, as one running sum over all keys
    loses more than PyTorch's."""
    if p.dtype == tl.float32:
        return tl.fma(tl.dot(p, v, input_precision="ieee"), 1.0, acc)
    else:
        return tl.dot(p, v, acc)


@triton.jit
def _store_head(out_ptr, clip_ptr, acc, rows, mask_m, col, limit, OUT_COLS: tl.constexpr, WIDTH: tl.constexpr):
    if clip_ptr is not None:
        acc = clamp(acc, tl.load(clip_ptr), tl.load(clip_ptr + 1))
    offs = tl.arange(0, WIDTH)
    ptrs = out_ptr + rows[:, None] * OUT_COLS + (col + offs)[None, :]
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & (offs < limit)[None, :])


@triton.jit
def _attention_kernel(
    q_desc,  # [T, 3 * HEADS * HEAD_DIM] in blocks [BLOCK_M, HEAD]; without COPY_ENGINE a pointer, like the next three
    q_tail_desc,  # the same in blocks [BLOCK_M, TAIL]
    kv_desc,  # [BLOCK_N, HEAD]
    kv_tail_desc,  # [BLOCK_N, TAIL]
    out_ptr,  # [T, HEADS * HEAD_DIM]
    tiles_ptr,  # [tile capacity, 4] int32
    num_tiles_ptr,  # [1] int32
    clip_ptr,  # [2] fp32 or None
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,  # the power-of-two part of head_dim
    TAIL: tl.constexpr,  # the rest, padded; 0 if none
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    COLS: tl.constexpr = 3 * HEADS * HEAD_DIM
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_tiles = tl.load(num_tiles_ptr)
    for work in tl.range(tl.program_id(0), num_tiles * HEADS, tl.num_programs(0), num_stages=1):
        head = work // num_tiles  # neighbours in time share a head's keys, which stay in L2
        tile_ptr = tiles_ptr + 4 * (work % num_tiles)
        begin = tl.load(tile_ptr)
        end = tl.load(tile_ptr + 1)
        row0 = tl.load(tile_ptr + 2)
        col_q = head * HEAD_DIM
        col_k = (HEADS + head) * HEAD_DIM
        col_v = (2 * HEADS + head) * HEAD_DIM
        if not COPY_ENGINE:  # rows past the frame's end read as zeros
            q_src = tl.make_tensor_descriptor(q_desc, [end, COLS], [COLS, 1], [BLOCK_M, HEAD])
            kv_src = tl.make_tensor_descriptor(kv_desc, [end, COLS], [COLS, 1], [BLOCK_N, HEAD])
            if TAIL > 0:
                q_tail_src = tl.make_tensor_descriptor(q_tail_desc, [end, COLS], [COLS, 1], [BLOCK_M, TAIL])
                kv_tail_src = tl.make_tensor_descriptor(kv_tail_desc, [end, COLS], [COLS, 1], [BLOCK_N, TAIL])
            else:
                q_tail_src, kv_tail_src = None, None
        else:
            q_src, q_tail_src, kv_src, kv_tail_src = q_desc, q_tail_desc, kv_desc, kv_tail_desc

        q = q_src.load([row0, col_q])
        if TAIL > 0:
            q_tail = q_tail_src.load([row0, col_q + HEAD])
            q_tail = tl.where((tl.arange(0, TAIL) < HEAD_DIM - HEAD)[None, :], q_tail, 0.0).to(q.dtype)
            acc_tail = tl.zeros([BLOCK_M, TAIL], tl.float32)
        else:
            q_tail = q
        acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)

        full_end = begin + (end - begin - 1) // BLOCK_N * BLOCK_N
        for j in tl.range(begin, full_end, BLOCK_N, num_stages=NUM_STAGES):
            s = _scores(q, q_tail, kv_src, kv_tail_src, j, col_k, TAIL, HEAD)
            p, alpha, m, l = _softmax_step(s, m, l)
            p = p.to(q.dtype)
            acc = _add_product(acc * alpha[:, None], p, kv_src.load([j, col_v]))
            if TAIL > 0:
                acc_tail = _add_product(acc_tail * alpha[:, None], p, kv_tail_src.load([j, col_v + HEAD]))

        # The last block, 1 to BLOCK_N keys. Keys past the end belong to another frame and may be NaN: their scores
        # are masked and their values zeroed.
        valid = full_end + tl.arange(0, BLOCK_N) < end
        s = _scores(q, q_tail, kv_src, kv_tail_src, full_end, col_k, TAIL, HEAD)
        s = tl.where(valid[None, :], s, -float("inf"))
        p, alpha, m, l = _softmax_step(s, m, l)
        p = p.to(q.dtype)
        v = tl.where(valid[:, None], kv_src.load([full_end, col_v]), 0.0).to(q.dtype)
        acc = _add_product(acc * alpha[:, None], p, v)
        if TAIL > 0:
            # The tail of v goes through a HEAD-wide product here: ptxas 12.8 restores the descriptors of a chain of
            # 16-wide ones while the hardware still reads them, which ends in wild shared-memory reads
            # (`codegen_checks.rewritten_descriptors` finds the pattern in the machine code).
            keep = valid[:, None] & (tl.arange(0, HEAD) < TAIL)[None, :]
            v_wide = tl.where(keep, kv_src.load([full_end, col_v + HEAD]), 0.0).to(q.dtype)
            wide = tl.dot(p, v_wide, input_precision="ieee")
            acc_tail = acc_tail * alpha[:, None] + tl.sum(tl.reshape(wide, (BLOCK_M, HEAD // TAIL, TAIL)), 1)

        rows = row0 + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = rows < end
        _store_head(out_ptr, clip_ptr, acc / l[:, None], rows, mask_m, col_q, HEAD, HEADS * HEAD_DIM, HEAD)
        if TAIL > 0:
            rest: tl.constexpr = HEAD_DIM - HEAD
            _store_head(
                out_ptr, clip_ptr, acc_tail / l[:, None], rows, mask_m, col_q + HEAD, rest, HEADS * HEAD_DIM, TAIL
            )


def query_scale(head_dim: int, scale: float = 0.0) -> float:
    """Factor of q: `2 ** (query_scale q . k)` is `exp(scale q . k)`; scale 0 stands for `head_dim ** -0.5`."""
    return (scale or head_dim**-0.5) / math.log(2)


def attention(
    qkv: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
    heads: int,
    head_dim: int,
    config: AttentionConfig,
    clip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention within each segment that has tiles.

    Args:
        qkv: `[T, 3 * heads * head_dim]` contiguous, rotated q | k | v, q scaled by `query_scale(head_dim)`.
        segments: frames and the tile list for `config.block_m`.
        out: `[T, heads * head_dim]` contiguous; rows of other segments are left alone.
        config: tile and schedule.
        clip: `[2]` fp32, least and largest value of the output; None for no clamp.
    """
    assert qkv.is_contiguous() and out.is_contiguous(), "qkv and out must be contiguous"
    assert segments.block_m == config.block_m, f"expected tiles of {config.block_m} queries, got {segments.block_m}"
    head, tail = split_head(head_dim, config.max_head)
    programs = min(config.max_programs, segments.tiles.shape[0] * heads)
    if programs == 0:
        return out

    pdl = config.pdl and not triton.knobs.runtime.interpret
    constants = {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "HEAD": head,
        "TAIL": tail,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_STAGES": config.num_stages,
        "COPY_ENGINE": config.copy_engine,
        "USE_PDL": pdl,
    }
    descriptors = tuple(
        descriptor(qkv, rows, cols, config.copy_engine) if cols else None
        for rows in (config.block_m, config.block_n)
        for cols in (head, tail)
    )
    pointers = (out, segments.tiles, segments.num_tiles, clip)
    options = {"num_warps": config.num_warps} | ({"launch_pdl": True} if pdl else {})
    launch(_attention_kernel, programs, descriptors, pointers, constants, options)
    return out
