"""Barriers of the Hopper attention kernel, each warp waiting and arriving for itself where they are `BY_WARP`.

Triton has a warpgroup meet before one of its threads arrives, and where it sees no reason not to: three times a step.
As text none of these is left, and four warps arrive in place of a thread. Addresses are what this takes: barriers are
in the array of attention_places.py, in the order q_full, q_empty, full, empty, turn.
"""

from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fusedvit.kernels.hopper.attention_parts import Memory, Sizes
from fusedvit.kernels.hopper.compat import gl, gluon

WARPS = 4  # of a consumer


@gluon.constexpr_function
def _first(kind, stages):
    """The first barrier of a kind."""
    return {"q_full": 0, "q_empty": 2, "full": 4, "empty": 4 + stages, "turn": 4 + 2 * stages}[kind]


@gluon.constexpr_function
def _making(stages, consumers, turns):
    """By the CTA's first thread. Those that nobody waits at are not made: see `sass.overwritten_barriers`."""
    alike = [(2, 1), (2, WARPS * consumers), (stages, 1), (stages, WARPS * consumers)] + [(consumers, WARPS)] * turns
    counts = [count for many, count in alike for _ in range(many)]
    made = "\n".join(f"@one mbarrier.init.shared::cta.b64 [$1+{8 * i}], {count};" for i, count in enumerate(counts))
    return f"{{ .reg .b32 t; .reg .pred one; mov.u32 t, %tid.x; setp.eq.u32 one, t, 0;\n{made}\nmov.u32 $0, 0; }}"


@gluon.constexpr_function
def _waiting(first):
    return f"""{{ .reg .b32 at; .reg .pred complete;
        mad.lo.u32 at, $1, 8, $3;
        waitLoop: mbarrier.try_wait.parity.shared::cta.b64 complete, [at+{8 * first}], $2;
        @!complete bra.uni waitLoop;
        mov.u32 $0, 0; }}"""


@gluon.constexpr_function
def _arriving(first):
    return f"""{{ .reg .b32 at; .reg .pred one;
        mov.u32 at, %laneid; setp.eq.u32 one, at, 0;
        mad.lo.u32 at, $1, 8, $2;
        @one mbarrier.arrive.shared::cta.b64 _, [at+{8 * first}];
        mov.u32 $0, 0; }}"""


@gluon.constexpr_function
def _address(first):
    """Handed from lane to lane, so that ptxas does not work it out anew wherever it is needed."""
    return f"""{{ .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, {8 * first};
        shfl.sync.idx.b32 $0, at, 0, 31, -1; }}"""


@gluon.jit
def address_of_barriers(x, s: Sizes):
    """Of the first of all. `x`: any number."""
    TEXT: gl.constexpr = _address(s.BARRIERS_AT)
    return gl.inline_asm_elementwise(TEXT, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def make_barriers(x, s: Sizes):
    """All of them. `x`: any number."""
    TEXT: gl.constexpr = _making(s.STAGES, s.CONSUMERS, s.PING_PONG)
    barriers = address_of_barriers(x, s)
    gl.inline_asm_elementwise(TEXT, "=r,r", [barriers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def handle(m: Memory, KIND: gl.constexpr, i, s: Sizes):
    """The `i`-th of a kind, for Gluon."""
    if s.BY_WARP:
        FIRST: gl.constexpr = s.BARRIERS_AT + _first(KIND, s.STAGES)
        return m.full.index(FIRST + i)
    elif KIND == "q_full":
        return m.q_full.index(i)
    elif KIND == "q_empty":
        return m.q_empty.index(i)
    elif KIND == "full":
        return m.full.index(i)
    elif KIND == "empty":
        return m.empty.index(i)
    else:
        return m.turn.index(i)


@gluon.jit
def await_phase(m: Memory, KIND: gl.constexpr, i, parity, barriers, s: Sizes):
    """Waits at the `i`-th of a kind; `barriers` is their address."""
    if s.BY_WARP:
        TEXT: gl.constexpr = _waiting(_first(KIND, s.STAGES))
        i, parity = gl.to_tensor(i), gl.to_tensor(parity)
        gl.inline_asm_elementwise(TEXT, "=r,r,r,r", [i, parity, barriers], dtype=gl.int32, is_pure=False, pack=1)
    else:
        mbarrier.wait(handle(m, KIND, i, s), parity)


@gluon.jit
def arrive(m: Memory, KIND: gl.constexpr, i, barriers, s: Sizes):
    """A consumer arrives at the `i`-th of a kind."""
    if s.BY_WARP:
        TEXT: gl.constexpr = _arriving(_first(KIND, s.STAGES))
        i = gl.to_tensor(i)
        gl.inline_asm_elementwise(TEXT, "=r,r,r", [i, barriers], dtype=gl.int32, is_pure=False, pack=1)
    else:
        mbarrier.arrive(handle(m, KIND, i, s), count=1)
