"""Counters of one fused tower, and its report."""

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

from fusedvit.checks.fallback import BYPASSED, message, with_advice
from fusedvit.errors import Reason
from fusedvit.forks import is_held
from fusedvit.graphs.manager import MIB
from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.ops import ops_for
from fusedvit.model.plan import plan_for
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime.captured_encoder import TowerGraphs

logger = logging.getLogger("fusedvit")

MOST_LINES = 25  # most lines of a report
MOST_STALE = 3  # report lines about what is wrong with a tuning table
MOST_COPIES = 7  # report lines about copies on other devices: as many as one host has


@dataclass
class Stats:
    """What a tower has done since it was fused.

    Attributes:
        fused: calls that ran fused.
        original: calls that took the original code, by kind of reason.
        raised: calls that raised an error instead: wrong input, what `strict` refuses, a machine out of memory.
        details: the detail of the last reason of each kind.
        eager_runs: runs of the fused encoder outside a graph, by reason.
        items: images and videos of fused calls.
        patch_tokens: patch tokens of fused calls.
    """

    fused: int = 0
    original: Counter[str] = field(default_factory=Counter)
    raised: int = 0
    details: dict[str, str] = field(default_factory=dict)
    eager_runs: Counter[str] = field(default_factory=Counter)
    items: int = 0
    patch_tokens: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)  # a signal's handler may count, too

    @property
    def calls(self) -> int:
        """All calls of the tower."""
        return self.fused + self.original.total() + self.raised

    def _renew_locks(self) -> None:
        """See `forks`."""
        if is_held(self._lock):
            self._lock = threading.RLock()

    def add(self, **amounts: int) -> None:
        """Adds to counters by name."""
        counters = vars(self)
        with self._lock:
            for name, amount in amounts.items():
                counters[name] += amount  # without a call, at which a signal's handler may come in between

    def count_original(self, reason: Reason, name: str | None = None) -> None:
        """Counts a call that takes the original code.

        Args:
            name: of the tower, for a warning at the first call for each kind of reason; None: no warning.
        """
        with self._lock:
            self.original[reason.kind] += 1
            self.details[reason.kind] = reason.detail
            first = self.original[reason.kind] == 1
        if first and name is not None:
            logger.warning("%s", message(name, reason))

    def as_dict(self) -> dict[str, Any]:
        """The counters as a dictionary of plain values."""
        with self._lock:
            calls, fused, raised = self.calls, self.fused, self.raised
            original, details = dict(self.original), dict(self.details)
        return {
            "calls": calls,
            "fused": fused,
            "original": original,
            "raised": raised,
            "details": {kind: detail for kind, detail in details.items() if detail},
            "eager_runs": dict(self.eager_runs),
            "items": self.items,
            "patch_tokens": self.patch_tokens,
        }


def of_graphs(graphs: TowerGraphs, eager_runs: int) -> dict[str, Any]:
    """Counters of a tower's graphs, their limits, and the MiB that they hold.

    Args:
        eager_runs: runs of the tower outside its graphs.
    """
    counted = graphs.manager.stats.as_dict()
    runs = counted["replays"] + eager_runs
    return counted | {
        "hit_rate": counted["replays"] / runs if runs else 0.0,
        "token_budgets": graphs.limits.token_budgets,
        "max_items": graphs.limits.max_items,
        "max_frames": graphs.limits.max_frames,
        "buffers_mib": graphs.encoder.held_bytes() / MIB,
        "held_mib": graphs.manager.held_bytes() / MIB,
    }


def compiles() -> int:
    """How many kernels of `fusedvit.kernels` this process has compiled or loaded, for all towers and devices; constant
    after a warm-up."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("fusedvit.kernels.")]
    kernels = {id(v): v for module in modules for v in vars(module).values() if isinstance(v, JITFunction)}
    held = [list(caches[0].values()) for kernel in kernels.values() for caches in list(kernel.device_caches.values())]
    return sum(compiled is not None for found in held for compiled in found)  # None while another process compiles it


def choices(spec: VisionSpec, dtype: torch.dtype, target: Target, budgets: Sequence[int]) -> list[str]:
    """Report lines: the backends that `budgets` of patch tokens use, those that `target` lacks and why, and the tuning
    table."""
    used: dict[str, dict[str, None]] = {}
    for tokens in budgets:
        for op, backend in plan_for(spec, tokens, dtype, target).choices().items():
            used.setdefault(backend, {})[op] = None
    lines = [f"  backend {backend}: {', '.join(ops)}" for backend, ops in sorted(used.items())]
    lines += [
        f"  without {b.op} in its {b.name} backend: {why}" for b, why in backends.unavailable_backends(target, dtype)
    ]
    table = tuning_table.table_for(target)
    count, name = len(table.entries), target.name or "this device"
    lines.append(
        f"  tuning table of {name}: {_counted(count, 'entry')}"
        if count
        else f"  no tuning table for {name}: heuristics choose"
    )
    stale = [f"  {why}; heuristics used instead" for why in table.stale]
    return lines + _folded(stale, MOST_STALE, "tuning tables that are not used")


def describe(
    tower: nn.Module,
    parameter: torch.Tensor,
    family: str,
    spec: VisionSpec,
    stats: dict[str, Any],
    reason: Reason | None,
    strict: bool,
) -> str:
    """The report: what is fused, on which operations, the memory held, and why anything is not fused.

    Args:
        parameter: a parameter of the tower, as `WeightCache.first_parameter` returns it.
        stats: what `stats()` of the tower's handle returns.
        reason: why the tower as it stands cannot run fused, or None.
        strict: calls raise for such a reason.
    """
    state = f"fused on {ops_for(parameter.device).name} operations"
    if reason is not None:
        state = f"{'cannot run fused' if strict else 'original code'}: {with_advice(reason)}"
    where = torch.cuda.get_device_name(parameter.device) if parameter.device.type == "cuda" else "no GPU"
    about = [
        f"{type(tower).__name__} ({family}), {parameter.dtype} on {parameter.device} ({where}): {state}",
        f"  {spec.depth} blocks of {spec.hidden_size} channels, {spec.num_heads} heads of {spec.head_dim}, "
        f"MLP {spec.intermediate_size} {spec.activation}, output {spec.out_size}, deepstack {list(spec.deepstack)}",
        *_calls(stats),
    ]
    rest = [*_memory(stats), *_folded(list(map(_copy, stats["copies"])), MOST_COPIES, "copies")]
    if parameter.device.type == "cuda" and reason is None:  # else nothing is chosen, maybe as the device is emulated
        budgets = [b * spec.merge_unit for b in stats["graphs"]["token_budgets"]] if "graphs" in stats else [4096]
        rest += choices(spec, parameter.dtype, Target.of(parameter.device), budgets)
    if "forward" in tower.__dict__ and (reason is None or reason.kind != BYPASSED):
        rest.append("  the tower has a forward of its own, which decides whether the fused one is called")
    return _text([*about, *_reasons(stats, MOST_LINES - len(about) - len(rest)), *rest])


def describe_ended(first: str, stats: dict[str, Any]) -> str:
    """The report of a handle that no longer serves a tower: what it did before.

    Args:
        first: the first line, which says that the tower is unfused or gone.
    """
    calls = _calls(stats)
    return _text([first, *calls, *_reasons(stats, MOST_LINES - 1 - len(calls))])


def _text(lines: list[str]) -> str:
    """A report of `lines`; a compiler's message of several lines becomes one line."""
    return "\n".join(" ".join(line.splitlines()) for line in lines)


def _counted(count: int, what: str) -> str:
    """`count` and the noun `what`, given in the singular, in its right number."""
    if count == 1:
        return f"1 {what}"
    if what.endswith("y") and what[-2] not in "aeiou":
        return f"{count} {what[:-1]}ies"
    return f"{count} {what}{'es' if what.endswith('ch') else 's'}"


def _folded(lines: list[str], room: int, what: str) -> list[str]:
    """At most `room` of `lines`; if some are left out, the last line says how many, and that they are `what`."""
    return lines if len(lines) <= room else [*lines[: room - 1], f"  and {len(lines) - room + 1} more {what}"]


def _calls(stats: dict[str, Any]) -> list[str]:
    """Report lines with the calls by code path and the runs."""
    calls, items, patches = (stats[key] for key in ("calls", "items", "patch_tokens"))
    lines = [
        f"  {_counted(calls, 'call')}: {_by_code_path(stats)}; "
        f"{_counted(items, 'item')}, {_counted(patches, 'patch')}, {_counted(stats['refreshes'], 'weight preparation')}"
    ]
    if "graphs" in stats:
        g = stats["graphs"]
        lines.append(
            f"  {_counted(g['replays'], 'replay')} ({g['hit_rate']:.0%} of runs, {g['padding']:.0%} padding), "
            f"{_counted(g['mispredictions'], 'misprediction')}, {_counted(g['captures'], 'graph')} captured, "
            f"{g['capture_failures']} failed"
        )
    return lines


def _copy(stats: dict[str, Any]) -> str:
    """What a copy of the tower on another device ran and holds, by its stats."""
    held = f"prepared weights {stats['weights_mib']:.1f} MiB"
    if "graphs" in stats:
        held += f", static buffers and graphs {stats['graphs']['held_mib']:.0f} MiB"
    return f"  copy on {stats['device']}: {_counted(stats['calls'], 'share')}: {_by_code_path(stats)}; {held}"


def _by_code_path(stats: dict[str, Any]) -> str:
    """How many calls ran fused and in the original code, and how many raised, if any did."""
    raised = f", {stats['raised']} raised" if stats["raised"] else ""
    return f"{stats['fused']} fused, {sum(stats['original'].values())} original code{raised}"


def _reasons(stats: dict[str, Any], room: int) -> list[str]:
    """A line for each reason why runs were not replayed or calls not fused; beyond `room` lines the rarest share
    one."""
    found = [(count, why, f"run without a graph: {count} ({why})") for why, count in stats["eager_runs"].items()]
    for kind, count in stats["original"].items():
        advice = with_advice(Reason(kind, stats["details"].get(kind, "")))
        found.append((count, kind, f"original code, {_counted(count, 'call')}: {advice}"))
    room = max(1, room)
    if len(found) > room:
        found.sort(key=lambda reason: -reason[0])
        rest = ", ".join(f"{why} {count}" for count, why, _ in found[room - 1 :])
        found[room - 1 :] = [(0, "", f"and for other reasons: {rest}")]
    return [f"  {line}" for _, _, line in found]


def _memory(stats: dict[str, Any]) -> list[str]:
    """Report lines with the memory by holder, and the limits of the graphs."""
    lines = [f"  memory: prepared weights {stats['weights_mib']:.1f} MiB"]
    if "graphs" in stats:
        g = stats["graphs"]
        pool = g["held_mib"] - g["buffers_mib"]
        together = stats["weights_mib"] + g["held_mib"]
        lines[0] += f", static buffers {g['buffers_mib']:.0f} MiB, graphs {pool:.0f} MiB: {together:.0f} MiB together"
        budgets = g["token_budgets"]
        items, frames = _counted(g["max_items"], "item"), _counted(g["max_frames"], "frame")
        sizes = f"from {budgets[0]} to {budgets[-1]}"
        lines.append(f"  {_counted(len(budgets), 'token budget')} {sizes}, at most {items} and {frames} a graph")
    lines[0] += f"; {_counted(stats['compiles'], 'kernel')} loaded"
    return lines
