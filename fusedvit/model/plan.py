"""Chooses the backend and launch configuration of each operation of the encoder for a token budget.

The tuning table comes first, then the heuristic of each backend that the device supports, fastest backend first.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch

from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.attention import Segments
from fusedvit.kernels.backends import Key
from fusedvit.kernels.hopper.attention_configs import (
    ALL_FRAMES,
    LONG_FRAMES,
    SHORT_FRAME,
    SHORT_FRAMES,
    WINDOWS,
    two_lists,
)
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig
from fusedvit.kernels.hopper.gemm_swap_ab_configs import UNIT, HopperSwapABConfig
from fusedvit.kernels.metadata import SHORT_TILES, TILES, Layout, Metadata
from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.kernels.tuning_table import Table
from fusedvit.model.merger_overlap import MergerOverlap, merger_overlap
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import pitch_of

# Rows up to which the products of blocks with sandwich norms use programmatic dependent launch. On an H100 it makes
# Gemma 4's towers (31B, E4B) 1.6 and 3.4 % faster at 1089 rows. At 2520 rows it gives 1.5 and 1.7 % for proj and fc2,
# which follow attention and another product; with fc1 too, towers get slower. At 20160 rows 31B's gets 1 % slower.
SANDWICH_PDL_ROWS = {"qkv": 1280, "fc1": 1280, "proj": 3072, "fc2": 3072}


@dataclass(frozen=True)
class EncoderPlan:
    """One configuration per operation, whose type determines the backend. All calls of a token budget have equal plans.

    If `short_attention` is set, it is for frames of at most `SHORT_FRAME` tokens, which have a separate list of tiles,
    and `attention` is for longer frames. `overlap` says which deepstack mergers are overlapped with blocks.
    """

    patch: Any
    qkv: Any
    attention: Any
    proj: Any
    fc1: Any
    fc2: Any
    max_programs: int
    deepstack_fc1: Any = None
    merger_fc1: Any = None
    merger_fc2: Any = None
    window_attention: Any = None
    downsample: Any = None
    merger_proj: Any = None
    short_attention: Any = None
    overlap: MergerOverlap | None = None

    @property
    def overlapped(self) -> tuple[int, ...]:
        """The deepstack mergers that are overlapped with blocks, in the order of their buffers."""
        return () if self.overlap is None else self.overlap.mergers

    def of_patch(self, width: int) -> Any:
        """The configuration of the patch embedding for rows of `width` values: `patch` with at most one stage per
        step."""
        steps = -(-width // UNIT)
        too_deep = isinstance(self.patch, HopperSwapABConfig) and self.patch.stages > steps
        return replace(self.patch, stages=steps) if too_deep else self.patch

    def of_deepstack(self, merger: int) -> "EncoderPlan":
        """The plan with the configurations of deepstack merger `merger` as those of the last merger."""
        if self.overlap is None or merger not in self.overlap.mergers:
            return replace(self, merger_fc1=self.deepstack_fc1)
        return replace(self, merger_fc1=self.overlap.fc1, merger_fc2=self.overlap.fc2)

    def of_overlapped_block(self) -> "EncoderPlan":
        """The plan of a block that has a merger overlapped with it."""
        return self if self.overlap is None else replace(self, **dict(self.overlap.blocks))

    def choices(self) -> dict[str, str]:
        """The backend of each operation, by the operation's name."""
        others = ("max_programs", "overlap")
        configs = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in others}
        return {name: backends.backend_of(config).name for name, config in configs.items() if config is not None}

    def layout(self, spec: VisionSpec) -> Layout:
        """The metadata that this plan needs for `spec`."""
        return Layout(
            merge=spec.merge_size,
            head_dim=spec.head_dim,
            block_m=self.attention.block_m,
            side=spec.position_side,
            taps=spec.position_taps if spec.position_side else 0,
            window=spec.window * spec.merge_size,
            window_block_m=self.window_attention.block_m if spec.window else 0,
            short=SHORT_FRAME if self.short_attention else 0,
            short_block_m=self.short_attention.block_m if self.short_attention else 0,
        )

    def frames(self, meta: Metadata) -> tuple[tuple[Segments, Any], ...]:
        """(Frames and their tiles, configuration) of each launch of attention over whole frames, long ones first."""
        config, short = self.attention, self.short_attention
        tiles = meta.cu_seqlens, meta.tiles, meta.count(TILES), config.block_m
        if short is None:
            return ((Segments(*tiles), config),)
        few = meta.cu_seqlens, meta.short_tiles, meta.count(SHORT_TILES), short.block_m
        return (Segments(*tiles, above=SHORT_FRAME), config), (Segments(*few, up_to=SHORT_FRAME), short)


@dataclass(frozen=True)
class Task:
    """One operation at one row budget, for tuning and for lookup.

    Attributes:
        name: the field of `EncoderPlan`.
        key: the key in the tuning table.
        widest: the widest tile of plain Triton whose epilogue does not spill registers.
    """

    name: str
    key: Key
    widest: int = 256


def tasks(spec: VisionSpec, tokens: int, dtype: torch.dtype) -> tuple[Task, ...]:
    """Every operation of a plan."""
    rows = budget(tokens)
    merged = max(1, rows // spec.merge_unit)
    c, name = spec.hidden_size, str(dtype).removeprefix("torch.")

    def linear(field: str, kind: str, n: int, k: int, widest: int = 128, rows: int = rows) -> Task:
        return Task(field, Key(backends.LINEAR, kind, n, k, rows, name), widest)

    def attention(field: str, kind: str) -> Task:
        return Task(field, Key(backends.ATTENTION, kind, spec.num_heads, spec.head_dim, rows, name))

    patch, qkv, out, fc1 = _epilogues(spec)
    inner, factors = pitch_of(spec.intermediate_size, dtype), 2 if spec.gated else 1
    widest = 128 if spec.activation == "gelu" or spec.gated else 256
    frames: tuple[Task, ...] = (attention("attention", ALL_FRAMES),)
    if two_lists(rows, spec.head_dim):
        frames = attention("attention", LONG_FRAMES), attention("short_attention", SHORT_FRAMES)
    blocks: tuple[Task, ...] = (
        linear("patch", patch, c, spec.patch_width, 64 if spec.position_side else 128),
        linear("qkv", qkv, 3 * c, c),
        *frames,
        linear("proj", out, c, c),
        linear("fc1", fc1, inner * factors, c, widest),
        linear("fc2", out, c, inner),
    )
    if spec.window:
        blocks = (*blocks, attention("window_attention", WINDOWS))
    return (*blocks, *(linear(*task, rows=merged) for task in _merger_tasks(spec, dtype)))


def _epilogues(spec: VisionSpec) -> tuple[str, str, str, str]:
    """Epilogue kinds of the patch embedding, of qkv, of layers that write the residual stream, and of the MLP's first
    layer."""
    heads = "heads+rope" if spec.norms_heads else ""
    if spec.sandwich:
        return "taps" if spec.position_side else "bias", heads or "bias", "bias", spec.activation
    norm = "norm" if spec.norm == "layer" else "rms"
    patch = "bias" if spec.patch_norm else "taps+stats" if spec.position_side else "stats"
    qkv = f"{norm}+{heads or 'rope'}" if heads or not spec.qk_norm else norm
    return patch, qkv, "residual+stats", f"{norm}+{spec.activation}"


def _merger_tasks(spec: VisionSpec, dtype: torch.dtype) -> tuple[tuple[str, str, int, int, int], ...]:
    """(field, kind, n, k, widest tile) of each linear layer over merged tokens."""
    out, wide, inner = spec.out_size, spec.merged_size, pitch_of(spec.merger_size, dtype)
    if spec.tail == "downsample":
        return (
            ("downsample", "bias", out, wide, 256),
            ("merger_proj", "bias", out, out, 256),
            ("merger_fc1", "swiglu", 2 * inner, out, 128),
            ("merger_fc2", "bias", out, inner, 256),
        )
    if spec.tail == "merger":
        last = ("merger_fc1", "gelu", wide, wide, 128), ("merger_fc2", "bias", out, wide, 256)
        return (("deepstack_fc1", "norm+gelu", wide, wide, 128), *last) if spec.deepstack else last
    return ()


def plan_for(
    spec: VisionSpec, tokens: int, dtype: torch.dtype, target: Target, table: Table | None = None
) -> EncoderPlan:
    """The plan of the token budget for `tokens` patch tokens; deterministic.

    Args:
        table: the tuning table; None for the table of `target`'s GPU, shipped or the user's own.
    """
    chosen = chosen_for(spec, tokens, dtype, target, table)
    configs = {name: config for name, (_, config) in chosen.items()}
    if configs.get("short_attention") == configs["attention"]:
        del configs["short_attention"]  # one list of tiles suffices
    by_name = {task.name: task for task in tasks(spec, tokens, dtype)}
    overlap = merger_overlap(spec, chosen, lambda name, t: heuristic(by_name[name], dtype, t), dtype, target)
    return EncoderPlan(**configs, max_programs=4 * target.num_sms, overlap=overlap)


@lru_cache(maxsize=1024)
def known_plan(spec: VisionSpec, tokens: int, dtype: torch.dtype, target: Target) -> EncoderPlan:
    """`plan_for`, cached until `tuning_table.forget`: compiling, capturing and running a budget all need its plan."""
    return plan_for(spec, tokens, dtype, target)


tuning_table.on_forget.append(known_plan.cache_clear)


def chosen_for(
    spec: VisionSpec, tokens: int, dtype: torch.dtype, target: Target, table: Table | None = None
) -> dict[str, tuple[Key, Any]]:
    """Key and configuration of each operation, for the arguments of `plan_for`."""
    table = tuning_table.table_for(target) if table is None else table
    chosen = {task.name: (task.key, choose(task, dtype, target, table)) for task in tasks(spec, tokens, dtype)}
    return {name: (key, as_launched(spec, name, budget(tokens), config)) for name, (key, config) in chosen.items()}


def as_launched(spec: VisionSpec, name: str, rows: int, config: Any) -> Any:
    """The configuration with which a plan of `rows` patch tokens launches `name`, given the chosen `config`."""
    wanted = spec.sandwich and rows <= SANDWICH_PDL_ROWS.get(name, 0)
    return replace(config, pdl=True) if wanted and isinstance(config, HopperGemmConfig | HopperSwapABConfig) else config


def choose(task: Task, dtype: torch.dtype, target: Target, table: Table) -> Any:
    """The configuration of one task: the table's, else the heuristic's."""
    found = table.find(task.key, target, dtype)
    return heuristic(task, dtype, target) if found is None else found


def heuristic(task: Task, dtype: torch.dtype, target: Target) -> Any:
    """The configuration from the first backend that supports the task, fastest first; plain Triton supports all."""
    for backend in backends.available_backends(task.key.op, target, dtype):
        config = backend.heuristic(task.key, dtype, target, task.widest)
        if config is not None:
            return config
    raise AssertionError(f"no backend answers {task.key}")
