"""`python -m fusedvit.bench.attention`: attention alone at several widths of heads and layouts, against FA3 and cuDNN.

Every output passes the tolerance rule before it is timed. A graph holds several calls, so that its start counts little,
and contenders run interleaved.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench import baselines
from fusedvit.bench.ops import SEQUENCES, SEQUENCES_ON_CPU, attention_case, times_us
from fusedvit.bench.records import arguments, passport, run_program, write
from fusedvit.kernels.hopper.attention_configs import (
    ALL_FRAMES,
    LONG_FRAMES,
    SHORT_FRAMES,
    WINDOW,
    WINDOWS,
    hopper_attention_config,
    two_lists,
)
from fusedvit.kernels.launch import compiling_only
from fusedvit.kernels.tile_configs import Target, attention_config, budget

HEADS, HEAD_DIMS = 16, (72, 80, 64)
PEERS = ("fa3", "cudnn")
MORE = {  # a tile or a wave more or less than `SEQUENCES`; the last has long sequences and short ones
    "1 x 196": (196,),
    "4 x 196": (196,) * 4,
    "256 x 64": (64,) * 256,  # windows of Qwen2.5-VL
    "1 x 1296": (1296,),
    "1 x 1536": (1536,),
    "1 x 2048": (2048,),
    "8 x 784": (784,) * 8,
    "mixed": (4096, *(196,) * 8, 1120, 160),
    "8192 + 32 x 256": (8192, *(256,) * 32),
}
OVERFLOWING = ("16 x 1024", 200.0)  # a layout and the growth of its keys: every tile is computed again


def configurations(lengths: tuple[int, ...], head_dim: int, dtype: torch.dtype, target: Target) -> dict[str, Any]:
    """Configurations by name: "ours" is what the heuristics choose for as many tokens, "triton" plain Triton's."""
    rows = budget(sum(lengths))
    plain = attention_config(rows, HEADS, head_dim, dtype, target)
    kinds = (LONG_FRAMES, SHORT_FRAMES) if two_lists(rows, head_dim) else (ALL_FRAMES,)
    kinds = (WINDOWS,) if max(lengths) == WINDOW else kinds
    ours = tuple(hopper_attention_config(rows, HEADS, head_dim, dtype, target, kind) for kind in kinds)
    if None in ours:
        return {"ours": plain, "triton": plain}
    return {"ours": ours[0] if len(set(ours)) == 1 else ours, "triton": plain}


def measure(
    head_dims: Sequence[int], device: torch.device, fa3: bool, chosen: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """A row per head_dim and layout: microseconds by name, and the faster peer's time over ours.

    Args:
        fa3: whether FA3 takes part; its library must be loaded.
        chosen: layouts by name; all where it is empty.
    """
    on_gpu = device.type == "cuda"
    dtype, target = torch.bfloat16 if on_gpu else torch.float32, Target.of(device)
    layouts = SEQUENCES | MORE if on_gpu else SEQUENCES_ON_CPU
    layouts = {label: lengths for label, lengths in layouts.items() if not chosen or label in chosen}
    runs = [(head_dim, label, 1.0) for head_dim in head_dims for label in layouts]
    if on_gpu and OVERFLOWING[0] in layouts:
        runs.append((head_dims[0], *OVERFLOWING))
    configs = [configurations(layouts[label], head_dim, dtype, target) for head_dim, label, _ in runs]
    if on_gpu:
        with compiling_only():
            for (head_dim, _, _), named in zip(runs, configs, strict=True):
                case = attention_case(HEADS, head_dim, (64,), dtype, device, False)
                for config in named.values():
                    case.run(config, 0)
    rows = []
    for (head_dim, label, growth), named in zip(runs, configs, strict=True):
        case = attention_case(HEADS, head_dim, layouts[label], dtype, device, fa3, growth)
        us, wrong = times_us(case, named, device)
        peers = [us[name] for name in PEERS if name in us]
        ratio = {"ratio": round(min(peers) / us["ours"], 3)} if peers and "ours" in us else {}
        row = {"head_dim": head_dim, "layout": label, "growth": growth, "us": us, **ratio}
        rows.append({**row, "config": str(named["ours"]), "wrong": wrong})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Prints a line a row and writes the document; the exit code is 1 where an output is out of tolerance."""
    parser = arguments(__doc__)
    parser.add_argument("--fa3", type=Path, help="vLLM's FA3 library, or that compressed with xz")
    parser.add_argument("--head-dim", type=int, action="append", help="72, 80 and 64 if left out")
    parser.add_argument("--layout", action="append", help='"1 x 1296", "mixed", …; all if left out')
    args = parser.parse_args(argv)
    if args.fa3 is not None:
        baselines.load_fa3(args.fa3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = {"--fa3": args.fa3, "--head-dim": args.head_dim, "--layout": args.layout, "--json": args.json}
    here = passport("python -m fusedvit.bench.attention", given, args.commit)
    rows = measure(args.head_dim or HEAD_DIMS, device, args.fa3 is not None, args.layout or ())
    for row in rows:
        print(json.dumps(row))
    write(args.json, {"passport": here, "rows": rows})
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    run_program(main)
