"""A fused tower in a few lines of text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusedvit.kernels import forms, tables
from fusedvit.kernels.configs import Target
from fusedvit.ops import ops_for
from fusedvit.plan import plan_for
from fusedvit.reasons import ADVICE
from fusedvit.spec import VisionSpec


def choices(spec: VisionSpec, dtype: torch.dtype, target: Target, budgets: Sequence[int]) -> list[str]:
    """The form of each operation at each budget of patch tokens, and what `target` does without: forms, and tuning
    tables or parts of them that do not hold here."""
    lines = []
    for tokens in budgets:
        by_form: dict[str, list[str]] = {}
        for op, form in plan_for(spec, tokens, dtype, target).choices().items():
            by_form.setdefault(form, []).append(op)
        chosen = "; ".join(f"{form}: {', '.join(ops)}" for form, ops in sorted(by_form.items()))
        lines.append(f"  per-op choice to {tokens} patch tokens: {chosen}")
    lines += [f"  without {f.op} in its {f.name} form: {why}" for f, why in forms.absences(target, dtype)]
    return lines + [f"  {why}; heuristics used instead" for why in tables.table_for(target).stale]


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
            f"{g['replays']} replays and {g['mispredicted']} mispredicted, padding {g['padding']:.0%}, "
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
