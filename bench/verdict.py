"""The tolerance rule over everything that a tower returns."""

from typing import Any

import torch

from fusedvit.tolerance import compare


def verdict_of(ours: list[torch.Tensor], ref: list[torch.Tensor], pt: list[torch.Tensor]) -> dict[str, Any]:
    """The tolerance rule over all outputs; the worst ratios."""
    verdicts = [compare(*answers) for answers in zip(ours, ref, pt, strict=True)]
    return {
        "passed": all(v.passed for v in verdicts),
        "reason": next((v.reason for v in verdicts if not v.passed), ""),
        "largest": max(v.ratio_max for v in verdicts),
        "rms": max(v.ratio_rms for v in verdicts),
    }


def outputs_of(outputs: Any) -> list[torch.Tensor]:
    """Every tensor that a tower returns."""
    return [
        *(outputs[name] for name in ("last_hidden_state", "pooler_output") if outputs.get(name) is not None),
        *(outputs.get("deepstack_features") or []),
    ]
