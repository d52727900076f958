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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from fusedvit.kernels.descriptor import rows_behind
from fusedvit.kernels.epilogue import Epilogue, NormFold, Rope, Taps
from fusedvit.kernels.hopper.compat import TensorDescriptor, gl, gluon
from fusedvit.kernels.hopper.linear import _box, _constants, _extra_box, unsupported_operands
from fusedvit.kernels.hopper.linear_epilogue import Tail
from fusedvit.kernels.hopper.transposed_configs import UNIT, HopperTransposedConfig, unsupported_shape
from fusedvit.kernels.hopper.transposed_parts import WEIGHTS_BOX, Boxes, Ring, Tile, chunks_of, units_of
from fusedvit.kernels.hopper.transposed_tail import LINES
from fusedvit.kernels.hopper.transposed_warps import _consumer, _producer
from fusedvit.kernels.launch import Loaded, launch
from fusedvit.kernels.sass import misplaced_ring


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
    config: HopperTransposedConfig,
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


def unsupported(e: Epilogue, x: torch.Tensor, n: int, config: HopperTransposedConfig) -> str:
    """Why this product and what follows it cannot run here, or ""."""
    if e.gated or e.taps is not None:
        return "no swiglu and no position taps"
    if e.stats is not None and (e.stats.width != config.block_n or n % config.block_n):
        return f"statistics of whole {config.block_n}s in parts of as many, got {n} in parts of {e.stats.width}"
    return unsupported_operands(e, x) or unsupported_shape(n, x.shape[1], config.stages)


def _boxes(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, e: Epilogue, config: HopperTransposedConfig
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
