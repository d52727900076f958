"""`kernels.linear` for Hopper, the other way round and in turns: two consumers with a tile each, over one ring.

The formula is that of `kernels.linear`, which is this function's twin. Products and epilogue are those of
`kernels.hopper.transposed`, out^T = w x^T; but CTAs are persistent, and each tile is one consumer's alone, 128 features
by up to 128 rows:

    producer : w and x of a k-step -> the ring (TMA; a `full` and an `empty` barrier a stage), tile after tile
    consumer : moments of its tile's rows, bias, column sums; its turn: ring -> WGMMA, two halves of 64 features;
               then, while the other has its turn, a chunk of 64 rows at a time, half by half: epilogue -> TMA store.
               Residual or rotary words come where the chunk before has left

`turn` lets a consumer begin once the other has asked for all of its tile's products, so that tensor cores do not wait
for an epilogue, and nobody is two rounds of the ring behind, which keeps barrier parities unambiguous.

tests/kernels/hopper_alternating_protocol.py runs this protocol in plain Python under random interleaving.
"""

from typing import Any

import torch
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from fusedvit.kernels.codegen_checks import misplaced_ring
from fusedvit.kernels.epilogue import Epilogue, NormFold, Rope, Taps
from fusedvit.kernels.hopper.alternating_configs import HALVES, HopperAlternatingConfig
from fusedvit.kernels.hopper.alternating_warps import Turns, _consumer, _producer
from fusedvit.kernels.hopper.gemm import _constants
from fusedvit.kernels.hopper.gemm_epilogue import Tail
from fusedvit.kernels.hopper.gemm_swap_ab import LINES, Boxes, Ring, Tile, _boxes, chunks_of, unsupported
from fusedvit.kernels.hopper.gluon_compat import gl, gluon
from fusedvit.kernels.launch import Loaded, launch

HALF = gl.constexpr(HALVES)


@gluon.jit
def _consumer_0(tile, tail, ring, turns, boxes):
    _consumer(tile, tail, ring, turns, boxes, 0)


@gluon.jit
def _consumer_1(tile, tail, ring, turns, boxes):
    _consumer(tile, tail, ring, turns, boxes, 1)


@gluon.jit
def _alternating_linear_kernel(
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
    STAGES: gl.constexpr,
):
    num_rows = gl.load(num_rows_ptr)  # first, as all tiles hang on it
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BRINGS: gl.constexpr = HAS_RESIDUAL or ROPE_COLS > 0
    RING: gl.constexpr = STAGES * (HALF + chunks_of(ROWS))
    units = gl.allocate_shared_memory(x_desc.dtype, [RING, 64, 64], LINES)
    staged = gl.allocate_shared_memory(x_desc.dtype, [2 * HALF, 64, 64], LINES)
    moments = gl.allocate_shared_memory(x_desc.dtype, [2, 16, 64], LINES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    brought = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    # In turns, as Triton has the CTA meet between two of one array. Those that nobody waits at must not be initialised:
    # see `sass.overwritten_barriers`.
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        if i < 2:
            mbarrier.init(turn.index(i), count=1)
        if i < 2 and BRINGS:
            mbarrier.init(brought.index(i), count=1)
    gdc_launch_dependents()

    tile = Tile(N, K, ROWS, WIDTH, BOX, HALF, STAGES, BRINGS)
    tail = Tail(
        bias_ptr, colsum_ptr, stats_in_ptr, num_rows_ptr, num_rows_ptr, num_rows_ptr, stats_out_ptr,
        num_rows, N, EPS, IN_PARTS, CENTRED, IN_WIDTH, IN_LENGTH, ROPE_COLS, HEAD_DIM, TAPS, ACT, LIMIT, HAS_BIAS,
        HAS_RESIDUAL, OUT_WIDTH,
    )  # fmt: skip
    ring = Ring(units, full, empty, full)
    turns = Turns(Ring(staged, brought, brought, brought), moments, turn)
    boxes = Boxes(x_desc, wide_desc, w_desc, out_desc, extra_desc)
    args = (tile, tail, ring, turns, boxes)
    gl.warp_specialize([(_consumer_0, args), (_consumer_1, args), (_producer, args)], [4, 1], [232, 40])


_NO_NORM, _NO_ROPE, _NO_TAPS = NormFold(), Rope(), Taps()
_placed: set[Loaded] = set()  # compiled kernels whose ring is where it must be


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    config: HopperAlternatingConfig,
) -> torch.Tensor:
    """See `kernels.linear.linear`.

    Raises:
        ValueError: what `transposed.unsupported` says, before any launch.
        RuntimeError: this Triton puts the ring elsewhere; what was launched then is wrong.
    """
    (rows, k), n = x.shape, weight.shape[0]
    e = epilogue
    alike: Any = config  # it has whatever `transposed` goes by
    reason = unsupported(e, x, n, alike)
    if reason:
        raise ValueError(f"linear in its alternating form takes {reason}")
    assert weight.shape[1] == k and out.shape == (rows, n), f"x {x.shape}, weight {weight.shape}, out {out.shape}"
    norm, rope = e.norm or _NO_NORM, e.rope or _NO_ROPE
    pointers = (
        e.bias,
        norm.colsum,
        None if norm.stats is None else norm.stats.partials,
        None if e.stats is None else e.stats.partials,
    )
    loaded = launch(
        _alternating_linear_kernel,
        min(config.tiles(rows, n), config.max_programs),
        _boxes(x, weight, out, e, alike),
        tuple(num_rows if p is None else p for p in pointers) + (num_rows,),
        _constants(n, k, e, norm, rope, _NO_TAPS) | config.constants(),
        config.options(),
    )
    if loaded is not None and loaded not in _placed:
        said = misplaced_ring(loaded.ptx(), config.ring_bytes())
        if said:
            raise RuntimeError(said)
        _placed.add(loaded)
    return out
