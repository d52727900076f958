"""Counters of one fused tower."""

import logging
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from triton.runtime.jit import JITFunction

from fusedvit.checks.fallback import ADVICE
from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.ops import ops_for
from fusedvit.model.plan import plan_for
from fusedvit.model.spec import VisionSpec

# ── stats ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

logger = logging.getLogger("fusedvit")


@dataclass
class Stats:
    """What a tower has done since it was fused.

    Attributes:
        calls: forward calls.
        fused: calls that ran fused.
        original: calls that took the original code, by reason.
        eager: runs of the fused encoder outside a graph, by reason.
        items: images and videos of fused calls.
        tokens: patch tokens of fused calls.
    """

    calls: int = 0
    fused: int = 0
    original: Counter[str] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    items: int = 0
    tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: int) -> None:
        """Adds to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def count_original(self, reason: str, name: str) -> None:
        """Counts a call that takes the original code; warns the first time for each reason."""
        with self._lock:
            self.original[reason] += 1
            first = self.original[reason] == 1
        if first:
            logger.warning("%s runs its original code: %s (%s)", name, reason, ADVICE[reason])

    def as_dict(self) -> dict[str, Any]:
        """Plain values, a copy."""
        return {
            "calls": self.calls,
            "fused": self.fused,
            "original": dict(self.original),
            "eager": dict(self.eager),
            "items": self.items,
            "tokens": self.tokens,
        }


# ── compiles ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# How many of our kernels this process has compiled.


def compiles() -> int:
    """Compiled kernels of `fusedvit.kernels` in this process, for all towers and devices: it stays after a warm-up."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("fusedvit.kernels.")]
    kernels = {id(v): v for module in modules for v in vars(module).values() if isinstance(v, JITFunction)}
    return sum(len(caches[0]) for kernel in kernels.values() for caches in list(kernel.device_caches.values()))


# ── report ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A fused tower in a few lines of text.


def choices(spec: VisionSpec, dtype: torch.dtype, target: Target, budgets: Sequence[int]) -> list[str]:
    """The backend of each operation at each budget of patch tokens, and what `target` does without: forms, and tuning
    tables or parts of them that do not hold here."""
    lines = []
    for tokens in budgets:
        by_backend: dict[str, list[str]] = {}
        for op, backend in plan_for(spec, tokens, dtype, target).choices().items():
            by_backend.setdefault(backend, []).append(op)
        chosen = "; ".join(f"{backend}: {', '.join(ops)}" for backend, ops in sorted(by_backend.items()))
        lines.append(f"  per-op choice to {tokens} patch tokens: {chosen}")
    lines += [
        f"  without {f.op} in its {f.name} backend: {why}" for f, why in backends.unavailable_backends(target, dtype)
    ]
    return lines + [f"  {why}; heuristics used instead" for why in tuning_table.table_for(target).stale]


def describe(tower: nn.Module, family: str, spec: VisionSpec, stats: dict[str, Any], reason: str | None) -> str:
    """What is fused, on which operations, what memory it holds, and why anything is not.

    Args:
        stats: of the tower's handle.
        reason: why the tower as it stands cannot run fused, or None.
    """
    parameter = next(tower.parameters())
    state = f"fused on the {ops_for(parameter.device).name} table" if reason is None else f"original code: {reason}"
    lines = [
        f"{type(tower).__name__} ({family}): {state}",
        f"  {spec.depth} blocks of {spec.hidden_size} channels, {spec.num_heads} heads of {spec.head_dim}, "
        f"MLP {spec.intermediate_size} {spec.activation}, output {spec.out_size}, deepstack {list(spec.deepstack)}",
        f"  {parameter.dtype} on {parameter.device}, prepared weights {stats['weights_mib']:.1f} MiB",
        f"  {stats['calls']} calls, {stats['fused']} fused, {stats['items']} items, {stats['tokens']} patch tokens, "
        f"{stats['refreshes']} refreshes, {stats['compiles']} kernels compiled",
    ]
    if "graphs" in stats:
        g = stats["graphs"]
        lines.append(
            f"  graphs for {list(g['token_budgets'])} tokens, {g['max_items']} items, {g['max_frames']} frames: "
            f"{g['replays']} replays and {g['mispredictions']} mispredictions, padding {g['padding']:.0%}, "
            f"buffers {g['buffers_mib']:.0f} MiB, "
            f"pool {g['held_mib'] - g['buffers_mib']:.0f} MiB"
        )
    if parameter.device.type == "cuda":
        budgets = [b * spec.merge_unit for b in stats["graphs"]["token_budgets"]] if "graphs" in stats else [4096]
        lines += choices(spec, parameter.dtype, Target.of(parameter.device), budgets)
    if "forward" in tower.__dict__:
        lines.append("  the tower has a forward of its own, which decides whether the fused one is called")
    lines += [f"  eager, {count} runs: {why}" for why, count in stats["eager"].items()]
    lines += [f"  original code, {count} calls: {why} ({ADVICE[why]})" for why, count in stats["original"].items()]
    return "\n".join(lines)
