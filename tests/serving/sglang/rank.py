"""One rank of an SGLang that runs its tower on two: `python -m tests.serving.sglang.rank RANK MEETING FOLDER`.

Writes what it found to FOLDER/RANK.pt: the answers of a tower that every rank holds whole, and of one that is sharded.
"""

import logging
import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.multimodal.mm_utils import run_dp_sharded_mrope_vision_model
from sglang.srt.runtime_context import get_context

from tests.serving.sglang.support import GRIDS, QWEN3, QWEN25, build, loaded, pixels_of, start, tower_of


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def whole(architecture: str) -> dict[str, Any]:
    """Images dealt out by SGLang, each rank's run fused and gathered: and the same by SGLang's own code."""
    with get_context().override_server_args(device="cpu", tp_size=2, mm_enable_dp_encoder=True):
        torch.manual_seed(0)
        tower = tower_of(loaded(build(architecture)))
        found: dict[str, Any] = {"fused": tower.__dict__.get("_fusedvit") is not None}
        for name, grid in GRIDS.items():
            given = pixels_of(tower, grid), [list(item) for item in grid]
            with torch.inference_mode():
                found[name] = run_dp_sharded_mrope_vision_model(tower, *given, rope_type="rope_3d").clone()
                cls, tower.__class__ = type(tower), type(tower).__mro__[1]
                found[f"{name} own"] = run_dp_sharded_mrope_vision_model(tower, *given, rope_type="rope_3d").clone()
                tower.__class__ = cls
        return found


def main(rank: int, meeting: Path, folder: Path) -> None:
    handler = _Lines()
    logging.getLogger("sglang.fusedvit").addHandler(handler)
    logging.getLogger("sglang.fusedvit").setLevel(logging.INFO)
    start(rank, 2, meeting)
    found: dict[str, Any] = {name: whole(name) for name in (QWEN3, QWEN25)}
    handler.lines.clear()
    tower = tower_of(loaded(build(QWEN3)))
    found["sharded"] = {"fused": "_fusedvit" in vars(tower), "lines": handler.lines}
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
