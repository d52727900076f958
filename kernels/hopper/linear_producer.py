"""The producer warp: operands of every k-step into the ring, residual or rotary words into the staging buffers."""

from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from fusedvit.kernels.hopper.compat import async_load, gl, gluon
from fusedvit.kernels.hopper.linear_parts import _k_range, _owned, _tile_of, _walk
from fusedvit.kernels.hopper.records import reinterpret


@gluon.jit
def _wanted(form, tail, cell: gl.constexpr, col0):
    """Whether this program ends the chunk at `col0` and needs something brought for it."""
    LIMIT: gl.constexpr = form.N if tail.HAS_RESIDUAL else tail.ROPE_COLS
    return _owned(form, cell) & (col0 < LIMIT)


@gluon.jit
def _bring(form, tail, boxes, staging, C: gl.constexpr, AT: gl.constexpr, row0, col0, phase):
    """Into the staging buffers of consumer C, whose place in the tile is AT: residual or rotary words, a chunk each."""
    CHUNKS: gl.constexpr = (form.BN1 + form.BN2) // 64
    PAIRS: gl.constexpr = tail.HEAD_DIM // 2
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    full = staging.full.index(C)
    mbarrier.wait(staging.empty.index(C), phase)
    count = 0
    for j in gl.static_range(CHUNKS):
        count += _wanted(form, tail, AT * CHUNKS + j, col0 + j * 64).to(gl.int32)
    for j in gl.static_range(CHUNKS + 1):  # even of none, so that the barrier turns with every tile
        mbarrier.expect(full, form.BM * j * 128, pred=count == j)
    for j in gl.static_range(CHUNKS):
        chunk = staging.chunks.index(C * CHUNKS + j)
        wanted = _wanted(form, tail, AT * CHUNKS + j, col0 + j * 64)
        row = row0 + AT * form.BM
        if tail.HAS_RESIDUAL:
            async_load(boxes.extra, [row, col0 + j * 64], full, chunk, pred=wanted)
        else:
            words = reinterpret(chunk, gl.int32, [form.BM, 32], WORDS)
            async_load(boxes.extra, [row, (col0 + j * 64) // 2 % PAIRS], full, words, pred=wanted)


@gluon.jit
def _load_step(form, ring, boxes, stage, row0, col0, k, X: gl.constexpr, W: gl.constexpr):
    """One k-step's operands into a stage; its barrier expects both from the first call on."""
    full = ring.full.index(stage)
    if W:
        mbarrier.expect(full, (form.BM * form.CONSUMERS + form.BN1 + form.BN2) * 128)
        async_load(boxes.w1, [col0, k * 64], full, ring.w1.index(stage))
        if form.BN2 > 0:
            async_load(boxes.w2, [col0 + form.BN1, k * 64], full, ring.w2.index(stage))
    if X:
        for c in gl.static_range(form.CONSUMERS):
            async_load(boxes.x, [row0 + c * form.BM, k * 64], full, ring.x.index(stage * form.CONSUMERS + c))


@gluon.jit
def _producer(form, tail, split, ring, staging, boxes):
    num_m, first, step, tiles = _walk(form, tail.num_rows)
    k0, steps = _k_range(form)
    ahead = gl.minimum(steps, form.STAGES)
    tile_m, tile_n = _tile_of(form, first, num_m)  # no tile where there are none, and then not asked for
    row0 = tile_m * (form.BM * form.CONSUMERS)
    col0 = tile_n * (form.BN1 + form.BN2)
    if tiles > 0:  # weights of the first stages, while the previous launch is still busy with x
        for k in range(0, ahead):
            _load_step(form, ring, boxes, k, 0, col0, k0 + k, False, True)
    gdc_wait()
    if tiles > 0:  # at once: everybody waits for it
        for k in range(0, ahead):
            _load_step(form, ring, boxes, k, row0, 0, k0 + k, True, False)
    for i in range(0, tiles):
        tile_m, tile_n = _tile_of(form, first + i * step, num_m)
        row0 = tile_m * (form.BM * form.CONSUMERS)
        col0 = tile_n * (form.BN1 + form.BN2)
        for k in range(0, steps):
            at = i * steps + k
            stage = at % form.STAGES
            if at >= ahead:
                mbarrier.wait(ring.empty.index(stage), ((at // form.STAGES) & 1) ^ 1)
                _load_step(form, ring, boxes, stage, row0, col0, k0 + k, True, True)
            if tail.HAS_RESIDUAL or tail.ROPE_COLS > 0:
                if k == gl.minimum(steps - 1, form.STAGES):  # by then the consumer has begun, and staging is about free
                    if form.CONSUMERS > 1:
                        for c in gl.static_range(form.CONSUMERS):
                            _bring(form, tail, boxes, staging, c, c, row0, col0, i & 1)
                    elif i % 2 == 0:
                        _bring(form, tail, boxes, staging, 0, 0, row0, col0, (i // 2) & 1)
                    else:
                        _bring(form, tail, boxes, staging, 1, 0, row0, col0, (i // 2) & 1)
