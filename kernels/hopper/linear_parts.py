"""What the warps of `kernels.hopper.linear` share: the records they work on, and who does which tile."""

from triton.experimental.gluon.language.nvidia.hopper import tma

from fusedvit.kernels.hopper.compat import gl, gluon
from fusedvit.kernels.hopper.linear_configs import vector_width, warpgroups
from fusedvit.kernels.hopper.linear_split import _owner
from fusedvit.kernels.hopper.records import record


@record
class Form:
    """What is known of a launch when it is compiled."""

    N: gl.constexpr
    K: gl.constexpr
    BM: gl.constexpr  # rows of a consumer's part of a tile
    BN1: gl.constexpr  # columns of the first accumulator
    BN2: gl.constexpr  # and of the second: 64 or 0
    CONSUMERS: gl.constexpr  # 1: ping-pong
    STAGES: gl.constexpr
    SPLITS: gl.constexpr
    GROUP_M: gl.constexpr
    X_IN_REGISTERS: gl.constexpr


@record
class Ring:
    """Operands on their way: [STAGES * CONSUMERS, BM, 64], [STAGES, BN1, 64], [STAGES, BN2, 64]."""

    x: gl.shared_memory_descriptor
    w1: gl.shared_memory_descriptor
    w2: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@record
class Staging:
    """Output chunks on their way out, [warpgroups * chunks, BM, 64]; residual or rotary words come in so."""

    chunks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # that has landed, a barrier per consumer
    empty: gl.shared_memory_descriptor  # the previous tile has left
    turn: gl.shared_memory_descriptor
    vectors: gl.shared_memory_descriptor  # [2 * warpgroups, columns] fp32: bias, then column sums of a tile


@record
class Boxes:
    x: tma.tensor_descriptor  # [T, K]
    w1: tma.tensor_descriptor  # [N, K], BN1 rows at a time
    w2: tma.tensor_descriptor  # [N, K], BN2 rows at a time
    out: tma.tensor_descriptor  # [T, N]
    extra: tma.tensor_descriptor  # residual [T, N] or rotary words [T, W]


VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # as values follow one another
_vector_width = gluon.constexpr_function(vector_width)
_warpgroups = gluon.constexpr_function(warpgroups)


@record
class Split:
    partials_ptr: gl.tensor  # [programs, cells, BM * 64] fp32
    counters_ptr: gl.tensor  # [tiles, consumers] int32, those of SPLITS


@gluon.jit
def _walk(form, num_rows):
    """(tile rows, this program's first tile, tiles to the next, tiles): a split tile's programs are neighbours."""
    num_m = (num_rows + form.BM * form.CONSUMERS - 1) // (form.BM * form.CONSUMERS)
    NUM_N: gl.constexpr = (form.N + form.BN1 + form.BN2 - 1) // (form.BN1 + form.BN2)
    first = gl.program_id(0) // form.SPLITS
    step = gl.num_programs(0) // form.SPLITS
    return num_m, first, step, (num_m * NUM_N - first + step - 1) // step


@gluon.jit
def _tile_of(form, t, num_m):
    """Tile index -> (tile row, tile column), GROUP_M tile rows at a time so that weights stay in L2."""
    NUM_N: gl.constexpr = (form.N + form.BN1 + form.BN2 - 1) // (form.BN1 + form.BN2)
    group = t // (form.GROUP_M * NUM_N)
    size = gl.minimum(num_m - group * form.GROUP_M, form.GROUP_M)
    inside = t - group * (form.GROUP_M * NUM_N)
    return group * form.GROUP_M + inside % size, inside // size


@gluon.jit
def _k_range(form):
    """This program's k-steps: (first, how many)."""
    NUM_K: gl.constexpr = (form.K + 63) // 64
    split = gl.program_id(0) % form.SPLITS
    first = split * NUM_K // form.SPLITS
    return first, (split + 1) * NUM_K // form.SPLITS - first


@gluon.jit
def _owned(form, cell):
    """Whether this program ends a cell."""
    return gl.program_id(0) % form.SPLITS == _owner(cell, form.SPLITS)
