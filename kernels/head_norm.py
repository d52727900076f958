"""RMSNorm of every head of q and k, then their rotary embedding, in place over packed q | k | v rows.

    y         = x / sqrt(mean of squares + eps) * weight                         a head at a time
    (a, b)    = y[2i:2i+2] -> (a cos - b sin, b cos + a sin)                     pairs made neighbours

in fp32. Stands between the qkv product and attention in towers whose q and k are normalised.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _head_norm_rope_kernel(
    qkv_ptr,  # [T, 3 * HEADS * HEAD_DIM]
    weight_ptr,  # [2, HEAD_DIM], q's and k's
    rope_ptr,  # [T, 2, HEAD_DIM / 2] fp32: cos, sin
    num_rows_ptr,  # [1] int32
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    EPS: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    num_rows = tl.load(num_rows_ptr)
    p = tl.arange(0, PAIRS)
    mask_p = (p < HALF)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows * 2 * HEADS, BLOCK), tl.num_programs(0)):
        offs = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)  # a head of q or k of a row
        row = offs // (2 * HEADS)
        head = offs % (2 * HEADS)
        mask_m = (row < num_rows)[:, None]
        mask = mask_m & mask_p
        ptrs = qkv_ptr + (row * PITCH + head * HEAD_DIM)[:, None] + 2 * p[None, :]
        a = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK, PAIRS]
        b = tl.load(ptrs + 1, mask=mask, other=0.0).to(tl.float32)
        weight = weight_ptr + (head // HEADS * HEAD_DIM)[:, None] + 2 * p[None, :]
        cos = tl.load(rope_ptr + row[:, None] * HEAD_DIM + p[None, :], mask=mask, other=1.0)
        sin = tl.load(rope_ptr + row[:, None] * HEAD_DIM + HALF + p[None, :], mask=mask, other=0.0)

        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(a * a + b * b, 1), HEAD_DIM * 1.0) + EPS))[:, None]
        a = a * rstd * tl.load(weight, mask=mask, other=0.0).to(tl.float32)
        b = b * rstd * tl.load(weight + 1, mask=mask, other=0.0).to(tl.float32)

        tl.store(ptrs, (a * cos - b * sin).to(qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(ptrs + 1, (b * cos + a * sin).to(qkv_ptr.dtype.element_ty), mask=mask)


def head_norm_rope(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    rope: torch.Tensor,
    num_rows: torch.Tensor,
    heads: int,
    eps: float,
    max_programs: int,
) -> torch.Tensor:
    """Normalises and turns q and k of the first `num_rows` rows of `qkv` `[T, 3 * heads * head_dim]`, in place.

    Args:
        weight: `[2, head_dim]`, of q's norm and k's, contiguous.
        rope: `[T, 2, head_dim / 2]` fp32, cos and sin of each pair's angle.
        num_rows: `[1]` int32 on the device.
        heads: of q, and of k.
        max_programs: bound of the persistent grid.
    """
    head_dim = weight.shape[1]
    assert qkv.stride(1) == 1 and qkv.shape[1] == 3 * heads * head_dim, f"qkv {qkv.shape}, {heads} heads of {head_dim}"
    block = 32
    programs = min(max_programs, triton.cdiv(qkv.shape[0] * 2 * heads, block))
    if programs:
        _head_norm_rope_kernel[(programs,)](
            qkv,
            weight,
            rope,
            num_rows,
            HEADS=heads,
            HEAD_DIM=head_dim,
            EPS=eps,
            PITCH=qkv.stride(0),
            BLOCK=block,
            PAIRS=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return qkv
