"""`python -m fusedvit.bench.attention`: attention in each of its forms beside FA3 and cuDNN, in one run.

Every answer is held to the tolerance rule before it is timed; ten calls a graph, so that launching counts little. In
turns each finds the GPU's clock up; with `--sustained` each runs alone without a pause, too, as power lets it.
"""

import argparse
import functools
import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench import peer_attention
from fusedvit.bench.cases import Case, attention_case
from fusedvit.bench.kernel_bench import SEQUENCES, SEQUENCES_ON_CPU
from fusedvit.bench.passport import passport
from fusedvit.bench.power import sustained
from fusedvit.bench.timing import Contender, captured, in_turns
from fusedvit.kernels.backends import BackendFailed
from fusedvit.kernels.hopper import attention_configs as hopper
from fusedvit.kernels.hopper.attention_configs import (
    ALL_FRAMES,
    HEADS_AT_A_TIME,
    LONG_FRAMES,
    SHORT_FRAMES,
    WINDOW,
    WINDOWS,
    HopperAttentionConfig,
    hopper_attention_config,
    schedules,
    two_lists,
)
from fusedvit.kernels.launch import compiling_only
from fusedvit.kernels.tile_configs import Target, attention_config, budget

HEADS = 16
CALLS = 10  # of a graph
BY_HEADS = 6144  # rows from which heads a few at a time take part
PEERS = ("fa3", "cudnn")
MORE = {  # a tile or a wave more or less than SEQUENCES have; the last, what a plan with two lists of tiles is for
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
OVERFLOWING = ("16 x 1024", 200.0)  # a layout and by how much its keys grow: every tile is redone


def forms(lengths: tuple[int, ...], head_dim: int, dtype: torch.dtype, target: Target) -> dict[str, Any]:
    """Configurations by name: what ships for as many tokens (where a plan has two lists, those of long sequences and
    of short ones), the same begun when the last launch has ended, plain Triton, the backend's other schedules."""
    rows, sms = budget(sum(lengths)), target.num_sms
    plain = attention_config(rows, HEADS, head_dim, dtype, target)
    kinds = (LONG_FRAMES, SHORT_FRAMES) if two_lists(rows, head_dim) else (ALL_FRAMES,)
    kinds = (WINDOWS,) if max(lengths) == WINDOW else kinds
    shipped = [hopper_attention_config(rows, HEADS, head_dim, dtype, target, kind) for kind in kinds]
    found: dict[str, Any] = {"ships": plain, "triton": plain}
    if None not in shipped:
        apart = tuple(replace(config, pdl=False) for config in shipped if config)
        found = {"ships": _one_or_both(tuple(shipped)), "apart": _one_or_both(apart), "triton": plain}
    if hopper.absent(target, dtype):
        return found
    others = _schedules(head_dim, max(lengths))
    if rows >= BY_HEADS and head_dim != 128:
        others |= {f"{n} by heads": replace(others[n], together=HEADS_AT_A_TIME) for n in ("2 x 64", "3 x 64")}
    return found | {name: replace(c, max_programs=c.ctas * sms) for name, c in others.items()}


def _one_or_both(configs: tuple[Any, ...]) -> Any:
    return configs[0] if len(set(configs)) == 1 else configs


def _schedules(head_dim: int, longest: int) -> dict[str, HopperAttentionConfig]:
    if head_dim == 128:
        return {"1 x 64": hopper.SMALL_WIDE, "2 x 64": hopper.WIDE, "in turns": replace(hopper.WIDE, ping_pong=True)}
    short, long = schedules(head_dim)[1:]
    found = {
        "2 x 64": short,
        "2 x 64, other turns": replace(short, ping_pong=not short.ping_pong),
        "2 x 64, other barriers": replace(short, by_warp=not short.by_warp),
        "2 x 128": hopper.MIDDLE_OF_64 if head_dim == 64 else hopper.MIDDLE,
        "3 x 64": long,
    }
    if head_dim != 72:
        found |= {f"{n}, other offsets": replace(found[n], near=not found[n].near) for n in ("2 x 64", "3 x 64")}
    if longest <= 1024:
        found["1 x 64"] = hopper.TINY
    return found


def measure(
    head_dims: tuple[int, ...],
    device: torch.device,
    fa3: bool,
    only: tuple[str, ...],
    chosen: tuple[str, ...] = (),
    seconds: float = 0.0,
) -> list[dict[str, Any]]:
    """A row per head_dim and layout: microseconds by name, and the better peer's time over that of what ships.

    Args:
        only: names that `forms` gives; all where it is empty.
        chosen: layouts; all where it is empty.
        seconds: of launches without a pause, each contender; 0: none.
    """
    on_gpu = device.type == "cuda"
    dtype, target = torch.bfloat16 if on_gpu else torch.float32, Target.of(device)
    layouts = SEQUENCES | MORE if on_gpu else SEQUENCES_ON_CPU
    layouts = {label: lengths for label, lengths in layouts.items() if not chosen or label in chosen}
    cases = [(hd, label, 1.0) for hd in head_dims for label in layouts]
    if on_gpu and OVERFLOWING[0] in layouts:
        cases.append((head_dims[0], *OVERFLOWING))
    runs = []
    for head_dim, label, growth in cases:
        configs = forms(layouts[label], head_dim, dtype, target)
        runs.append((head_dim, label, growth, {name: c for name, c in configs.items() if not only or name in only}))
    if on_gpu:
        _compile([(head_dim, configs) for head_dim, _, _, configs in runs], device)
    rows = []
    for head_dim, label, growth, configs in runs:
        case = attention_case(HEADS, head_dim, layouts[label], dtype, device, fa3, growth)
        rows.append({"head_dim": head_dim, "layout": label, "growth": growth, **_row(case, configs, device, seconds)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _compile(runs: list[tuple[int, dict[str, Any]]], device: torch.device) -> None:
    """What will be run, on all cores."""
    with compiling_only():
        for head_dim, configs in runs:
            case = attention_case(HEADS, head_dim, (64,), torch.bfloat16, device, False)
            for config in configs.values():
                case.run(config, 0)


def _row(case: Case, configs: dict[str, Any], device: torch.device, seconds: float = 0.0) -> dict[str, Any]:
    runs = {name: run for name, run in case.peers.items() if name in PEERS}
    wrong = {}
    for name, config in configs.items():
        reason = _why_wrong(case, config)
        if reason:
            wrong[name] = reason
        else:
            runs[name] = functools.partial(case.run, config)
    contenders = [Contender(name, captured(run, CALLS, device), "gpu") for name, run in runs.items()]
    times = in_turns(contenders, device, seconds=0.02)
    us = {name: round(1e3 * statistics.median(values) / CALLS, 2) for name, values in times.items()}
    peers = [us[name] for name in PEERS if name in us]
    ratio = {"ratio": round(min(peers) / us["ships"], 3)} if peers and "ships" in us else {}
    row = {"us": us, **ratio, "ships": str(configs.get("ships")), "wrong": wrong}
    return row | ({"sustained": [_without_a_pause(c, device, seconds) for c in contenders]} if seconds else {})


def _without_a_pause(contender: Contender, device: torch.device, seconds: float) -> dict[str, Any]:
    ms, power = sustained(contender.run, device, seconds)
    return {"name": contender.name, "us": round(1e3 * ms / CALLS, 2)} | asdict(power)


def _why_wrong(case: Case, config: Any) -> str:
    try:
        return case.check(config).reason
    except BackendFailed as error:
        return str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fa3", type=Path, help="vLLM's FA3 library, or that with xz")
    parser.add_argument("--head-dim", type=int, nargs="*", default=[72, 80, 64])
    parser.add_argument(
        "--only", nargs="*", default=[], help='schedules: "ships", "triton", "2 x 64", …; all if left out'
    )
    parser.add_argument("--layout", nargs="*", default=[], help='"1 x 1296", "mixed", …; all if left out')
    parser.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS", help="of each, without a pause")
    parser.add_argument("--json", default="attention.json")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    if args.fa3 is not None:
        peer_attention.load_fa3(args.fa3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    only, layouts = tuple(args.only), tuple(args.layout)
    rows = measure(tuple(args.head_dim), device, args.fa3 is not None, only, layouts, args.sustained)
    document = {"passport": passport("attention", sys.argv[1:], args.commit), "rows": rows}
    Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
