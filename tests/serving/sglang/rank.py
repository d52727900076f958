"""One rank of an SGLang that runs its tower on two: `python -m tests.serving.sglang.rank RANK MEETING FOLDER`.

Writes what it found to FOLDER/RANK.pt: the answers of a tower that every rank holds whole, and of one that is sharded;
and what a sharded one does where ranks differ.
"""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.multimodal.mm_utils import run_dp_sharded_mrope_vision_model
from sglang.srt.runtime_context import get_context, get_parallel

from tests.serving.sglang.support import GRIDS, QWEN3, QWEN25, build, embed, loaded, own, pixels_of, start, tower_of


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


def sharded(architecture: str) -> dict[str, Any]:
    """Shards gathered into a copy on each rank: and the same by SGLang's own code, whose ranks wait for each other."""
    tower = tower_of(build(architecture))
    torch.manual_seed(1 + get_parallel().tp_rank)
    for name, parameter in tower.named_parameters():
        if "qkv" in name or "pos_embed" in name or "fc1" in name or "fc2.weight" in name or "gate_up" in name:
            parameter.data.mul_(1 + torch.rand(parameter.shape))  # ranks hold different shards
    loaded(tower)
    handle = vars(tower)["_fusedvit"]
    found: dict[str, Any] = {}
    for name, grid in GRIDS.items():
        given = pixels_of(tower, grid), torch.tensor(grid)
        with torch.inference_mode():
            found[name] = tower(*given).clone()
            found[f"{name} own"] = type(tower).__mro__[1].forward(tower, *given).clone()
    return found | {"fused": handle.stats()["fused"]}


def raised(tower: Any) -> str:
    """What a call raises; "" for nothing."""
    return error_of(lambda: embed(tower, GRIDS["mixed"]))


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""


def differences(rank: int) -> dict[str, Any]:
    """What one rank alone has met, and whether both go on afterwards; at last a rank that comes too late."""
    tower, found = tower_of(loaded(build())), dict[str, Any]()
    served = vars(tower)["_fusedvit_served"].sharded
    encode, want = served.encode, embed(tower, GRIDS["mixed"])

    def no_memory(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = tower.blocks[1].register_forward_hook(lambda *_: None) if rank else None
    found["hook"], found["counted"] = embed(tower, GRIDS["mixed"]), served.handle.stats()
    served.handle.reconfigure(replace(served.handle.config, strict=rank == 0))
    found["strict"] = raised(tower)
    if hook is not None:
        hook.remove()
    served.handle.reconfigure(replace(served.handle.config, strict=False, watch_data=False))
    served.encode = encode if rank else no_memory
    found["memory"], served.encode = raised(tower), encode
    tower.blocks[0].norm1.weight.data.mul_(1 + rank)
    served.handle.reconfigure(replace(served.handle.config, watch_data=True))
    found["weights"] = raised(tower)
    served.handle.reconfigure(replace(served.handle.config, watch_data=False))
    tower.blocks[0].norm1.weight.data.div_(1 + rank)
    if rank:  # one is enough
        served.handle.refresh()
    with patch.dict("os.environ", {"FUSEDVIT_CONFIG": '{"gather_sharded": false}'} if rank else {}):
        found["options"] = "_fusedvit" in vars(tower_of(loaded(build())))
    model = build()
    if rank:
        tower_of(model).blocks[1].register_forward_hook(lambda *_: None)
    with patch.dict("os.environ", {} if rank else {"FUSEDVIT_CONFIG": '{"strict": true}'}):
        found["strict at load"] = error_of(lambda: loaded(model))
    found["want"], found["after"] = want, torch.equal(embed(tower, GRIDS["mixed"]), want)
    given, fused = (pixels_of(tower, GRIDS["mixed"]), torch.tensor(GRIDS["mixed"])), served.handle.stats()["fused"]
    with torch.inference_mode():
        found["rows"] = torch.equal(served.handle.concatenated(*given), want)
        tower.to(torch.bfloat16)
        found["half"], found["half own"] = tower(*given), own(tower, GRIDS["mixed"])
    tower.to(torch.float32)
    found["fused"] = served.handle.stats()["fused"] - fused
    served.patience = 4
    time.sleep(9 * rank)
    found["late"] = raised(tower)
    time.sleep(9 * (1 - rank))  # its process is there still
    return found


def main(rank: int, meeting: Path, folder: Path) -> None:
    handler = _Lines()
    logging.getLogger("sglang.fusedvit").addHandler(handler)
    logging.getLogger("sglang.fusedvit").setLevel(logging.INFO)
    start(rank, 2, meeting)
    found: dict[str, Any] = {name: whole(name) for name in (QWEN3, QWEN25)}
    handler.lines.clear()
    found["sharded"] = {name: sharded(name) for name in (QWEN3, QWEN25)} | {"lines": [*handler.lines]}
    handler.lines.clear()
    with patch.dict("os.environ", {"FUSEDVIT_CONFIG": '{"gather_sharded": false}'}):
        tower = tower_of(loaded(build(QWEN3)))
    found["left alone"] = {"fused": "_fusedvit" in vars(tower), "lines": [*handler.lines]}
    handler.lines.clear()
    found["differences"] = differences(rank) | {"lines": [*handler.lines]}
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
