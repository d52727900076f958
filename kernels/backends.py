"""The backends of an operation: each runs the configurations of one type.

    LinearConfig, AttentionConfig   "triton"    plain Triton, every GPU and dtype
    HopperGemmConfig                "hopper"    Gluon, sm_90, 16 bits
    HopperSwapABConfig              "swap_ab"   Gluon, sm_90, 16 bits, GEMMs of few rows
    HopperAttentionConfig           "hopper"    Gluon, sm_90, 16 bits

This module says how a configuration is chosen for each; `fusedvit.model.ops` runs it. A backend that the device or the
installed Triton cannot run is never planned. A backend that fails to compile at its first launch raises
`BackendFailed`, and later plans of the process leave it out (`Target.of` lists it in `without`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusedvit.kernels import tile_configs
from fusedvit.kernels.epilogue import HEAD_WIDTH
from fusedvit.kernels.hopper import attention_configs, gemm_configs, gemm_swap_ab_configs, gluon_compat
from fusedvit.kernels.tile_configs import AttentionConfig, LinearConfig, Target

LINEAR, ATTENTION = "linear", "attention"


@dataclass(frozen=True)
class Key:
    """The operation and size that a configuration is chosen for.

    Attributes:
        op: `LINEAR` or `ATTENTION`.
        kind: for a linear layer, its epilogue ("norm+rope"); for attention, the frames that it runs over (see
            `hopper.attention_configs`).
        n, k: for a linear layer, output and input features; for attention, heads and head_dim.
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
    """A backend did not compile, or did not fit this GPU; later plans leave it out."""


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    Attributes:
        name: as tuning tables and reports write it.
        op: `LINEAR` or `ATTENTION`.
        version: incremented when the generated code changes so that old measurements no longer hold: entries of tuning
            tables are tied to it.
        config: type of its configurations, a flat frozen dataclass. A linear backend's has `block_n`, the width of the
            row statistics that it writes; an attention backend's has `block_m`, the queries of a tile.
        absent: (compute capability, dtype) -> why the backend cannot run there, or "".
        wrong: (key, configuration, target, dtype) -> why it cannot run, or would spill registers, or "".
        heuristic: (key, dtype, target, widest plain Triton tile whose epilogue does not spill) -> a configuration, or
            None to use another backend.
        candidates: same arguments -> configurations worth timing. The tuner drops those that compile badly.
    """

    name: str
    op: str
    version: int
    config: type
    absent: Callable[[int, torch.dtype], str]
    wrong: Callable[[Key, Any, Target, torch.dtype], str]
    heuristic: Callable[[Key, torch.dtype, Target, int], Any]
    candidates: Callable[[Key, torch.dtype, Target, int], list[Any]]

    @property
    def id(self) -> str:
        """Unique among backends: "linear/hopper"."""
        return f"{self.op}/{self.name}"


def _by_shape(choose: Callable[..., Any]) -> Callable[[Key, torch.dtype, Target, int], Any]:
    """Adapts a function of (rows, n, k, dtype, target, kind) to the arguments of `Backend.heuristic`."""
    return lambda key, dtype, target, widest: choose(key.rows, key.n, key.k, dtype, target, key.kind)


def _any_dtype(propose: Callable[..., Any]) -> Callable[[Key, torch.dtype, Target, int], list[Any]]:
    """Adapts a function of (rows, n, k, target, kind) to the arguments of `Backend.candidates`."""
    return lambda key, dtype, target, widest: list(propose(key.rows, key.n, key.k, target, key.kind))


def _valid_and_unspilled(
    wrong: Callable[..., str], spills: Callable[[Key, Any], bool]
) -> Callable[[Key, Any, Target, torch.dtype], str]:
    """A `Backend.wrong` made of a check of the configuration, and one of its registers under a key's epilogue."""

    def check(key: Key, config: Any, target: Target, dtype: torch.dtype) -> str:
        return wrong(config, target, dtype) or ("spills registers" if spills(key, config) else "")

    return check


def _with_whole_heads(key: Key, config: LinearConfig) -> LinearConfig:
    """`config` with tiles that hold whole heads and as many sums as before: more sums would spill."""
    if not _parts_heads(key, config.block_n):
        return config
    return replace(config, block_m=config.block_m * config.block_n // HEAD_WIDTH, block_n=HEAD_WIDTH)


def _parts_heads(key: Key, block_n: int) -> str:
    """Why a tile of so many columns cannot normalise heads, or ""."""
    wrong = "heads" in key.kind.split("+") and block_n % HEAD_WIDTH
    return f"heads of {HEAD_WIDTH} columns do not fit tiles of {block_n}" if wrong else ""


# Heuristics are tried in this order, the fastest backend first.
BACKENDS = (
    Backend(
        name="swap_ab",
        op=LINEAR,
        version=1,
        config=gemm_swap_ab_configs.HopperSwapABConfig,
        absent=gluon_compat.absent,
        wrong=_valid_and_unspilled(
            gemm_swap_ab_configs.wrong_hopper_swap_ab,
            lambda key, config: gemm_swap_ab_configs.spills(config, key.kind),
        ),
        heuristic=_by_shape(gemm_swap_ab_configs.hopper_swap_ab_config),
        candidates=_any_dtype(gemm_swap_ab_configs.hopper_swap_ab_candidates),
    ),
    Backend(
        name="hopper",
        op=LINEAR,
        version=1,
        config=gemm_configs.HopperGemmConfig,
        absent=gluon_compat.absent,
        wrong=_valid_and_unspilled(
            gemm_configs.wrong_hopper_gemm, lambda key, config: gemm_configs.spills(config, key.kind)
        ),
        heuristic=_by_shape(gemm_swap_ab_configs.hopper_gemm_config),
        candidates=_any_dtype(gemm_configs.hopper_gemm_candidates),
    ),
    Backend(
        name="hopper",
        op=ATTENTION,
        version=2,
        config=attention_configs.HopperAttentionConfig,
        absent=gluon_compat.absent,
        wrong=_valid_and_unspilled(
            attention_configs.wrong_hopper_attention, lambda key, config: attention_configs.spills(config)
        ),
        heuristic=_by_shape(attention_configs.hopper_attention_config),
        candidates=_by_shape(attention_configs.hopper_attention_proposals),
    ),
    Backend(
        name="triton",
        op=LINEAR,
        version=1,
        config=LinearConfig,
        absent=lambda capability, dtype: "",
        wrong=lambda key, config, target, dtype: (
            tile_configs.wrong_linear(config, target, dtype) or _parts_heads(key, config.block_n)
        ),
        heuristic=lambda key, dtype, target, widest: _with_whole_heads(
            key, tile_configs.linear_config(key.rows, key.n, key.k, dtype, target, max_block_n=widest)
        ),
        candidates=lambda key, dtype, target, widest: tile_configs.linear_candidates(
            key.rows, key.n, key.k, dtype, target, max_block_n=widest
        ),
    ),
    Backend(
        name="triton",
        op=ATTENTION,
        version=1,
        config=AttentionConfig,
        absent=lambda capability, dtype: "",
        wrong=lambda key, config, target, dtype: tile_configs.wrong_attention(config, target),
        heuristic=lambda key, dtype, target, widest: tile_configs.attention_config(key.rows, key.k, dtype, target),
        candidates=lambda key, dtype, target, widest: tile_configs.attention_candidates(key.rows, target),
    ),
)
_BY_CONFIG = {backend.config: backend for backend in BACKENDS}


def backend_of(config: object) -> Backend:
    """The backend that runs `config`."""
    backend = _BY_CONFIG.get(type(config))
    assert backend is not None, f"no backend runs a {type(config).__name__}; known: {[c.__name__ for c in _BY_CONFIG]}"
    return backend


def backend_named(op: str, name: str) -> Backend | None:
    """The backend of `op` called `name`, whether or not the device has it."""
    return next((backend for backend in BACKENDS if (backend.op, backend.name) == (op, name)), None)


def why_unavailable(backend: Backend, target: Target, dtype: torch.dtype) -> str:
    """Why `backend` cannot run on `target`, or ""."""
    return dict(target.without).get(backend.id) or backend.absent(target.capability, dtype)


def available_backends(op: str, target: Target, dtype: torch.dtype) -> list[Backend]:
    """The backends of `op` that run on `target`, the fastest first."""
    return [backend for backend in BACKENDS if backend.op == op and not why_unavailable(backend, target, dtype)]


def unavailable_backends(target: Target, dtype: torch.dtype) -> Iterator[tuple[Backend, str]]:
    """The backends that do not run on `target`, and why."""
    for backend in BACKENDS:
        reason = why_unavailable(backend, target, dtype)
        if reason:
            yield backend, reason
