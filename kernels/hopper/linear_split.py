"""The parts of a split product meet: each CTA of a tile ends some of its chunks and gives away what it has of the rest.

    partials: [CTA, chunk, BM, 64] fp32    sums of chunks that another CTA ends
    counters: [tile, consumer] int32       how many CTAs have ever written theirs, launch after launch

A tile's CTAs are neighbours, and CTAs start in order: of all that wait for one that has not started, at most one tile's
are; every other tile's finish and make room. The sum is taken in the order of the parts, whoever takes it.
Every launch adds a power of two to each counter that it uses, one per part and the last part the rest: nothing is set
back, the number that a CTA draws tells its launch's share from the ones before, also when the count wraps around.
"""

from fusedvit.kernels.hopper.compat import barrier, gl, gluon
from fusedvit.kernels.hopper.records import record


@record
class Exchange:
    """Where a consumer of a split product meets its peers."""

    partials_ptr: gl.tensor  # [programs, CELLS, BM, 64] fp32
    counter_ptr: gl.tensor  # this tile's and consumer's
    first: gl.tensor  # the tile's first program
    split: gl.tensor  # which part this program has
    SPLITS: gl.constexpr
    CELLS: gl.constexpr


@gluon.constexpr_function
def _whole(splits):
    """What a launch adds to a counter: the next power of two."""
    return 1 << (splits - 1).bit_length()


@gluon.jit
def _owner(cell: gl.constexpr, CELLS: gl.constexpr, SPLITS: gl.constexpr):
    """The part that ends a cell: they share the cells out evenly, or one each where parts are more."""
    return cell * (CELLS if CELLS < SPLITS else SPLITS) // CELLS


@gluon.jit
def _cell_ptrs(exchange, split, cell: gl.constexpr, BM: gl.constexpr, L: gl.constexpr):
    base = exchange.partials_ptr + ((exchange.first + split).to(gl.int64) * exchange.CELLS + cell) * (BM * 64)
    rows = gl.arange(0, BM, gl.SliceLayout(1, L)).to(gl.int64)
    cols = gl.arange(0, 64, gl.SliceLayout(0, L))
    return base + gl.expand_dims(rows * 64, 1) + gl.expand_dims(cols, 0)


@gluon.jit
def _give(exchange, x, cell: gl.constexpr, BM: gl.constexpr, L: gl.constexpr):
    """Leaves this program's part of a cell to whoever ends it."""
    gl.store(_cell_ptrs(exchange, exchange.split, cell, BM, L), x, cache_modifier=".cg")


@gluon.jit
def _meet(exchange):
    """Says that this consumer's cells are written, and waits until the peers' are."""
    barrier()  # every thread's stores come before the one thread's release
    WHOLE: gl.constexpr = _whole(exchange.SPLITS)
    mine = gl.where(exchange.split == exchange.SPLITS - 1, WHOLE - exchange.SPLITS + 1, 1)
    drawn = gl.atomic_add(exchange.counter_ptr, mine, sem="acq_rel", scope="gpu")
    complete = (drawn | (WHOLE - 1)) + 1
    while gl.atomic_add(exchange.counter_ptr, 0, sem="acquire", scope="gpu") - complete < 0:
        pass
    barrier()


@gluon.jit
def _add_part(exchange, total, x, s, cell: gl.constexpr, BM: gl.constexpr, L: gl.constexpr):
    ptrs = _cell_ptrs(exchange, s, cell, BM, L)
    theirs = gl.load(ptrs, mask=s != exchange.split, other=0.0, cache_modifier=".cg")
    return total + gl.where(exchange.split == s, x, theirs)


@gluon.jit
def _take(exchange, x, cell: gl.constexpr, BM: gl.constexpr, L: gl.constexpr):
    """The whole sum of a cell, part by part."""
    total = gl.zeros([BM, 64], gl.float32, L)
    if exchange.SPLITS <= 3 and BM * exchange.CELLS <= 384:  # asked for all at once, where registers allow
        for s in gl.static_range(exchange.SPLITS):
            total = _add_part(exchange, total, x, s, cell, BM, L)
    else:
        for s in range(exchange.SPLITS):
            total = _add_part(exchange, total, x, s, cell, BM, L)
    return total
