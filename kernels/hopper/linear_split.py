"""The parts of a split product meet: each CTA of a tile ends some of its chunks and gives away what it has of the rest.

    partials: [CTA, chunk, BM * 64] fp32   sums of chunks that another CTA ends, in the order that threads hold them
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

    partials_ptr: gl.tensor  # [programs, CELLS, BM * 64] fp32
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
def _owner(cell: gl.constexpr, SPLITS: gl.constexpr):
    """The part that ends a cell: in turns, so that each consumer of each part ends as many, give or take one."""
    return cell % SPLITS


@gluon.jit
def _as_held(x, BM: gl.constexpr):
    """[BM, 64] in a product's layout -> [BM * 64], four values of a thread in a row, then its neighbour's."""
    return x.reshape([BM // 64, 4, 2, 8, 8, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6]).reshape([BM * 64])


@gluon.jit
def _as_product(x, BM: gl.constexpr, L: gl.constexpr):
    """The reverse of `_as_held`."""
    x = x.reshape([BM // 64, 8, 4, 8, 4, 2, 2]).permute([0, 2, 5, 3, 1, 4, 6]).reshape([BM, 64])
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def _cell_ptrs(exchange, split, cell, BM: gl.constexpr, H: gl.constexpr):
    base = exchange.partials_ptr + ((exchange.first + split).to(gl.int64) * exchange.CELLS + cell) * (BM * 64)
    return base + gl.arange(0, BM * 64, H)


@gluon.jit
def _give(exchange, x, cell: gl.constexpr, BM: gl.constexpr):
    """Leaves this program's part of a cell to whoever ends it."""
    x = _as_held(x, BM)
    H: gl.constexpr = x.type.layout
    gl.store(_cell_ptrs(exchange, exchange.split, cell, BM, H), x, cache_modifier=".cg")


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
def _part_of(exchange, s, cell, BM: gl.constexpr, H: gl.constexpr):
    """Another program's part of a cell; 0 of this one's."""
    ptrs = _cell_ptrs(exchange, s, cell, BM, H)
    return gl.load(ptrs, mask=s != exchange.split, other=0.0, cache_modifier=".cg")


@gluon.jit
def _take(exchange, x, cell, BM: gl.constexpr):
    """The whole sum of a cell: of two or three parts all that is missing is asked for at once."""
    L: gl.constexpr = x.type.layout
    x = _as_held(x, BM)
    H: gl.constexpr = x.type.layout
    mine = exchange.split
    if exchange.SPLITS == 2:
        total = x + _part_of(exchange, 1 - mine, cell, BM, H)  # in either order
    elif exchange.SPLITS == 3:
        first = _part_of(exchange, gl.where(mine == 0, 1, 0), cell, BM, H)
        last = _part_of(exchange, gl.where(mine == 2, 1, 2), cell, BM, H)
        total = (first + gl.where(mine == 2, last, x)) + gl.where(mine == 2, x, last)
    else:
        total = gl.zeros([BM * 64], gl.float32, H)
        for s in range(exchange.SPLITS):
            total += gl.where(mine == s, x, _part_of(exchange, s, cell, BM, H))
    return _as_product(total, BM, L)
