"""What the warps of `kernels.hopper.transposed` share: records, and the instructions of a product of any width.

Gluon's own product has power-of-two tiles. An instruction of Hopper has 64 rows and any multiple of 8 columns, so it is
written here as text. Its operands are found by address: the ring lies where shared memory begins, as
`sass.misplaced_ring` makes sure.
"""

from triton.experimental.gluon.language.nvidia.hopper import tma

from fusedvit.kernels.hopper import transposed_configs as configs
from fusedvit.kernels.hopper.compat import gl, gluon
from fusedvit.kernels.hopper.records import record
from fusedvit.kernels.hopper.transposed_configs import UNIT_BYTES


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
