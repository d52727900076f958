"""The forms an operation comes in, chosen by the type of its configuration.

    LinearConfig, AttentionConfig   "triton": plain Triton, on every GPU, and the twin of every other backend
    HopperGemmConfig              "hopper": Gluon, on sm_90, in 16 bits
    HopperSwapABConfig          "swap_ab": Gluon, on sm_90, in 16 bits, for products of one wave
    HopperAttentionConfig           "hopper": Gluon, on sm_90, in 16 bits

A backend that a device or this Triton lacks is never planned. One that does not compile at a first launch raises
`BackendFailed` and is out of every later plan of this process: `Target.of` says so in `without`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.errors import TritonError

from fusedvit.kernels import attention as plain_attention
from fusedvit.kernels import epilogue, metadata, tile_configs
from fusedvit.kernels import epilogue as plain_epilogue
from fusedvit.kernels import linear as plain_linear
from fusedvit.kernels import linear as plain_split
from fusedvit.kernels.attention import Segments
from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.hopper import attention_configs as hopper_configs
from fusedvit.kernels.hopper import gemm_swap_ab_configs, gluon_compat
from fusedvit.kernels.hopper.attention_configs import (
    HopperAttentionConfig,
    hopper_attention_config,
    hopper_attention_proposals,
)
from fusedvit.kernels.hopper.gemm_configs import (
    HopperGemmConfig,
    hopper_gemm_candidates,
    hopper_gemm_config,
    wrong_hopper_gemm,
)
from fusedvit.kernels.tile_configs import AttentionConfig, LinearConfig, Target

if gluon_compat.AVAILABLE:  # elsewhere these modules cannot even be read
    from fusedvit.kernels.hopper import attention as hopper_attention
    from fusedvit.kernels.hopper import gemm as hopper_linear
    from fusedvit.kernels.hopper import gemm_swap_ab as hopper_transposed
    from fusedvit.kernels.hopper import sources

LINEAR, ATTENTION = "linear", "attention"


@dataclass(frozen=True)
class Key:
    """What a configuration is chosen for.

    Attributes:
        op: "linear" or "attention".
        kind: of a linear, its epilogue ("norm+rope"); of attention, which frames (see `hopper.attention_choice`).
        n, k: of a linear, its output and input features; of attention, heads and head_dim.
        rows: row budget.
        dtype: "bfloat16", …
    """

    op: str
    kind: str
    n: int
    k: int
    rows: int
    dtype: str


class BackendFailed(RuntimeError):
    """A backend other than plain Triton did not compile or fit here; plans made from now on do without it."""


@dataclass(frozen=True)
class Backend:
    """One way to run an operation.

    Attributes:
        name: as tables and reports write it.
        op: `LINEAR` or `ATTENTION`.
        config: its configurations' type, a flat frozen dataclass. A linear backend's has `block_n`, the width of the row
            statistics it writes if it writes any; an attention backend's has `block_m`, the queries of a tile of
            `Segments`.
        run: signature of `linear.linear` or `attention.attention`.
        absent: (target, dtype) -> why the backend cannot run there, or "".
        wrong: (config, target, dtype) -> why the configuration cannot run there, or "".
        heuristic: (key, dtype, target, widest tile of plain Triton whose epilogue does not spill) -> a configuration,
            or None where the backend has no answer.
        candidates: the same arguments -> configurations worth timing, for the tuner, which prunes what compiles badly.
        modules: whose sources decide what the backend computes and how fast.
    """

    name: str
    op: str
    config: type
    run: Callable[..., torch.Tensor]
    absent: Callable[[Target, torch.dtype], str]
    wrong: Callable[[Any, Target, torch.dtype], str]
    heuristic: Callable[[Key, torch.dtype, Target, int], Any]
    candidates: Callable[[Key, torch.dtype, Target, int], list[Any]]
    modules: tuple[Any, ...]


def _never_absent(target: Target, dtype: torch.dtype) -> str:
    return ""


def _by_shape(choose: Callable[..., Any]) -> Callable[[Key, torch.dtype, Target, int], Any]:
    """What goes by what a key says: (rows, n, k, dtype, target, kind)."""
    return lambda key, dtype, target, widest: choose(key.rows, key.n, key.k, dtype, target, key.kind)


def _plain_linear(key: Key, dtype: torch.dtype, target: Target, widest: int) -> LinearConfig:
    return tile_configs.linear_config(key.rows, key.n, key.k, dtype, target, max_block_n=widest)


def _plain_linears(key: Key, dtype: torch.dtype, target: Target, widest: int) -> list[LinearConfig]:
    return tile_configs.linear_candidates(key.rows, key.n, key.k, dtype, target, max_block_n=widest)


def _plain_attentions(key: Key, dtype: torch.dtype, target: Target, widest: int) -> list[AttentionConfig]:
    return tile_configs.attention_candidates(key.rows, dtype, target)


def _plain_attention(key: Key, dtype: torch.dtype, target: Target, widest: int) -> AttentionConfig:
    return tile_configs.attention_config(key.rows, key.n, key.k, dtype, target)


def _likely(propose: Callable[..., Any]) -> Callable[[Key, torch.dtype, Target, int], list[Any]]:
    """Candidates that go by the same, whatever the dtype."""
    return lambda key, dtype, target, widest: list(propose(key.rows, key.n, key.k, target, key.kind))


def _hopper_forms() -> tuple[Backend, ...]:
    if not gluon_compat.AVAILABLE:
        return ()
    return (
        Backend(
            name="swap_ab",
            op=LINEAR,
            config=gemm_swap_ab_configs.HopperSwapABConfig,
            run=hopper_transposed.linear,
            absent=hopper_configs.absent,
            wrong=gemm_swap_ab_configs.wrong_hopper_swap_ab,
            heuristic=_by_shape(gemm_swap_ab_configs.hopper_swap_ab_config),
            candidates=_likely(gemm_swap_ab_configs.hopper_swap_ab_candidates),
            modules=sources.TRANSPOSED,
        ),
        Backend(
            name="hopper",
            op=LINEAR,
            config=HopperGemmConfig,
            run=hopper_linear.linear,
            absent=hopper_configs.absent,
            wrong=wrong_hopper_gemm,
            heuristic=_by_shape(hopper_gemm_config),
            candidates=_likely(hopper_gemm_candidates),
            modules=sources.LINEAR,
        ),
        Backend(
            name="hopper",
            op=ATTENTION,
            config=HopperAttentionConfig,
            run=hopper_attention.attention,
            absent=hopper_configs.absent,
            wrong=hopper_configs.wrong_hopper_attention,
            heuristic=_by_shape(hopper_attention_config),
            candidates=_by_shape(hopper_attention_proposals),
            modules=(*sources.ATTENTION, metadata),
        ),
    )


BACKENDS: tuple[Backend, ...] = (  # the fastest first, as heuristics ask them in this order
    *_hopper_forms(),
    Backend(
        name="triton",
        op=LINEAR,
        config=LinearConfig,
        run=plain_linear.linear,
        absent=_never_absent,
        wrong=tile_configs.wrong_linear,
        heuristic=_plain_linear,
        candidates=_plain_linears,
        modules=(plain_linear, plain_epilogue, plain_split, epilogue),
    ),
    Backend(
        name="triton",
        op=ATTENTION,
        config=AttentionConfig,
        run=plain_attention.attention,
        absent=_never_absent,
        wrong=tile_configs.wrong_attention,
        heuristic=_plain_attention,
        candidates=_plain_attentions,
        modules=(plain_attention, metadata),
    ),
)
_BY_CONFIG = {backend.config: backend for backend in BACKENDS}


def backend_of(config: object) -> Backend:
    """The backend that runs `config`."""
    backend = _BY_CONFIG.get(type(config))
    assert backend is not None, f"no backend runs a {type(config).__name__}; known: {[c.__name__ for c in _BY_CONFIG]}"
    return backend


def named(op: str, name: str) -> Backend | None:
    """The backend of `op` called `name`, on whatever device."""
    return next((backend for backend in BACKENDS if (backend.op, backend.name) == (op, name)), None)


def why_unavailable(backend: Backend, target: Target, dtype: torch.dtype) -> str:
    """Why `backend` cannot run on `target`, or ""."""
    failed = dict(target.without).get(f"{backend.op}/{backend.name}")
    return failed or backend.absent(target, dtype)


def present(op: str, target: Target, dtype: torch.dtype) -> list[Backend]:
    """The forms of `op` that `target` has, the fastest first."""
    return [backend for backend in BACKENDS if backend.op == op and not why_unavailable(backend, target, dtype)]


def unavailable_backends(target: Target, dtype: torch.dtype) -> Iterator[tuple[Backend, str]]:
    """The forms that `target` does without, and why."""
    for backend in BACKENDS:
        reason = why_unavailable(backend, target, dtype)
        if reason:
            yield backend, reason


def linear(
    x: torch.Tensor, weight: torch.Tensor, num_rows: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, config: Any
) -> torch.Tensor:
    """`kernels.linear.linear`, in the backend that `config` stands for. Raises `BackendFailed`."""
    return _run(backend_of(config), (x, weight, num_rows, out, epilogue, config))


def attention(
    qkv: torch.Tensor, segments: Segments, out: torch.Tensor, heads: int, head_dim: int, config: Any
) -> torch.Tensor:
    """`kernels.attention.attention`, in the backend that `config` stands for. Raises `BackendFailed`."""
    return _run(backend_of(config), (qkv, segments, out, heads, head_dim, config))


def _run(backend: Backend, arguments: tuple[Any, ...]) -> torch.Tensor:
    if backend.name == "triton":  # nothing to fall back to
        return backend.run(*arguments)
    try:
        return backend.run(*arguments)
    except (torch.cuda.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (TritonError, RuntimeError) as error:  # compilation and passes, ptxas, resources
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        tile_configs.note_failure(f"{backend.op}/{backend.name}", reason)
        raise BackendFailed(f"{backend.op} in its {backend.name} backend: {reason}") from error
