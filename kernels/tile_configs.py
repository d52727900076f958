"""Launch configurations of plain Triton's kernels: frozen dataclasses, and the pure heuristics that choose them.

Nothing here queries the GPU: the caller passes a `Target`. A configuration depends on the row *budget* (see `budget`),
never on the exact count, so that two calls of one budget run the same code and give the same bits.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

KIB = 1024
# Row budgets in the range where launches have few waves, so that four per octave are too few: multiples of 64, and
# seven tiles of a multiple of 16 rows; then eight per octave. 6336 (8 images of 784 patches fit) is two waves of 132
# SMs in tiles of 192 x 128 over 1024 columns, or of 144 x 192 over 1152.
_LONG = {*range(2048, 4097, 256), *range(4096, 8193, 512), 6336}
DENSE = tuple(sorted({*range(512, 2049, 64), *range(560, 2049, 112), *_LONG}))
SMALLEST_ROWS = 64  # rows
PDL_MAX_ROWS = 2048  # programmatic dependent launch (PDL) up to here: most longer launches gain nothing by it
SPLITS = tuple(range(1, 9))  # parts of split-K
MAX_PARTS = 132  # CTAs of a split-K GEMM, [128, 256] sums each at most
MAX_SUMS, MAX_COUNTERS = MAX_PARTS * 128 * 256, MAX_PARTS  # scratch memory of the encoder


@dataclass(frozen=True)
class Target:
    """The facts about a device that heuristics use.

    Attributes:
        capability: compute capability as `10 * major + minor` (90 on an H200).
        num_sms: streaming multiprocessors.
        max_shared: shared memory a block may opt into, in bytes.
        name: the driver's name, which selects the tuning table; "" for no table.
        without: (backend, reason) of backends that failed in this process (see `backends.BackendFailed`).
        share_of: SMs of the whole GPU if `num_sms` is only the part that a launch is bounded to; else 0.
    """

    capability: int = 90
    num_sms: int = 132
    max_shared: int = 227 * KIB
    name: str = ""
    without: tuple[tuple[str, str], ...] = ()
    share_of: int = 0

    def share(self, num_sms: int) -> "Target":
        """A part of the GPU, for launches that are overlapped with others."""
        return replace(self, num_sms=num_sms, share_of=self.share_of or self.num_sms)

    def whole(self) -> "Target":
        """The whole GPU, whether this target is a part of it or not."""
        return replace(self, num_sms=self.share_of, share_of=0) if self.share_of else self

    @property
    def has_copy_engine(self) -> bool:
        """Whether the device has TMA: hardware tensor descriptors."""
        return self.capability >= 90

    @staticmethod
    def of(device: torch.device) -> "Target":
        """The target of a CUDA `device`; the default one for any other (the interpreter)."""
        if device.type != "cuda":
            return Target()
        props = torch.cuda.get_device_properties(device)
        shared = props.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing from torch's stubs
        failed = tuple(sorted(_failed.items()))
        return Target(10 * props.major + props.minor, props.multi_processor_count, shared, props.name, failed)


_failed: dict[str, str] = {}  # backends that failed in this process; compiled kernels are kept as long (launch.py)


def note_failure(backend: str, reason: str) -> None:
    """Records that `backend` ("linear/hopper") does not compile or fit here: later targets list it in `without`."""
    _failed.setdefault(backend, reason)


@dataclass(frozen=True)
class LinearConfig:
    """Tile shape and schedule of `kernels.linear`.

    Attributes:
        max_programs: bound of the persistent grid.
        copy_engine: the device has TMA (sm_90 and later).
        splits: parts of K per tile, one program each.
        pdl: programmatic dependent launch (sm_90 and later).
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    max_programs: int = 132
    copy_engine: bool = True
    splits: int = 1
    pdl: bool = False

    @property
    def least_n(self) -> int:
        """Columns of the narrowest part of row statistics that this configuration can write."""
        return self.block_n

    def tiles(self, rows: int, n: int) -> int:
        """Tiles of an output of `rows` rows and `n` columns."""
        return -(-rows // self.block_m) * -(-n // self.block_n)

    def scratch_sizes(self, rows: int, n: int) -> tuple[int, int]:
        """(sums, counters) of a split-K GEMM of `rows` rows and `n` columns."""
        tiles = self.tiles(rows, n)
        return tiles * self.splits * self.block_m * self.block_n, tiles

    def constants(self) -> dict[str, int | bool]:
        """The kernel's compile-time arguments, in its order."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "SPLITS": self.splits,
            "USE_PDL": self.pdl,
        }

    def options(self) -> dict[str, int]:
        """Launch options."""
        pdl = {"launch_pdl": True} if self.pdl else {}  # Triton's interpreter knows no such option
        return {"num_warps": self.num_warps, "num_stages": self.num_stages} | pdl

    def shared_bytes(self, itemsize: int) -> int:
        """Upper estimate of the shared memory in bytes: all stages of the operands and one output tile."""
        stages = self.num_stages * (self.block_m + self.block_n) * self.block_k
        return (stages + self.block_m * self.block_n) * itemsize


@dataclass(frozen=True)
class AttentionConfig:
    """Tile shape of `kernels.attention`: `block_m` queries against `block_n` keys a step.

    Attributes:
        max_programs, copy_engine, pdl: as in `LinearConfig`.
        max_head: widest product over a head's channels; a wider head is split in two (see `split_head`).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_programs: int = 264
    max_head: int = 256
    copy_engine: bool = True
    pdl: bool = False


def split_head(head_dim: int, max_head: int = 256) -> tuple[int, int]:
    """(power-of-two part of at most `max_head`, padded rest) of a head: 72 -> (64, 16), 80 -> (64, 16), 64 -> (64, 0).

    Tensor cores take sides of at least 16, so the rest is padded to 16 or more.
    """
    head = min(1 << (head_dim.bit_length() - 1), max_head)
    rest = head_dim - head
    tail = 0 if rest == 0 else max(16, 1 << (rest - 1).bit_length())
    assert tail <= head, f"a head of {head_dim} is more than two products of {max_head}"
    return head, tail


def budget(rows: int) -> int:
    """The row budget of `rows`: the next of `DENSE`, or outside its range the next of 4, 5, 6 or 7 times a power of
    two; at least `SMALLEST_ROWS`."""
    if DENSE[0] < rows <= DENSE[-1]:
        return DENSE[bisect_left(DENSE, rows)]
    step = 1 << max(0, max(0, rows - 1).bit_length() - 3)
    return max(SMALLEST_ROWS, -(-rows // step) * step)


def ladder(smallest: int, largest: int) -> Iterator[int]:
    """The row budgets from `smallest`, itself included, to `largest`."""
    while smallest <= largest:
        yield smallest
        smallest = budget(smallest + 1)


@lru_cache(maxsize=1024)
def contents_of(rows: int, merge_unit: int = 1) -> tuple[int, int]:
    """The row counts by which choices for a budget of `rows` are judged: the full budget, and halfway to the budget
    below. The number of waves of tiles that a launch takes depends on the row count.

    Args:
        merge_unit: patches per row.
    """
    below = max(ladder(SMALLEST_ROWS, merge_unit * rows - 1), default=0) // merge_unit
    return rows, (below + rows + 1) // 2


# Tiles and their share of the tensor cores' peak in the main loop, as measured on an H200 (bf16, K = 1152). Two narrow
# tiles share an SM; they re-read the weights more often, which a long K makes dearer.
_TILES = (
    (LinearConfig(64, 64, 128, 4, 3), 2, 0.60),
    (LinearConfig(64, 128, 64, 4, 4), 2, 0.80),
    (LinearConfig(128, 128, 64, 8, 4), 1, 0.88),
    (LinearConfig(128, 256, 64, 8, 3), 1, 1.00),
)
_LONG_K, _LONG_K_LOSS = 2048, 0.87
# Cost of split-K in multiply-adds of an SM: 2 us of waiting for the last part, and the time to add each partial sum.
_SPLIT_WORK, _SPLIT_WORK_PER_SUM = 7.5e6, 126


def linear_config(
    rows: int, n: int, k: int, dtype: torch.dtype, target: Target, *, max_block_n: int = 256
) -> LinearConfig:
    """Tile choice for a `[rows, k] x [n, k]` GEMM: the tile whose waves over the SMs take the least time.

    Args:
        rows: row budget (see `budget`).
        n: output features.
        k: input features.
        dtype: operand dtype; fp32 runs on FMA units and wants small tiles.
        max_block_n: the widest tile whose epilogue does not spill: 256 columns, 128 under one that needs many registers
            (rotary, statistics, erf), 64 under position taps.
    """
    engine = target.has_copy_engine
    if dtype.itemsize > 2:
        return LinearConfig(64, 32, 32, 4, 2, max_programs=4 * target.num_sms, copy_engine=engine)
    if target.capability != 90:
        max_block_n = min(max_block_n, 128)
    best, least = _TILES[0][0], float("inf")
    for tile, ctas, rate in _TILES:
        config = replace(tile, max_programs=ctas * target.num_sms, copy_engine=engine)
        config = fit_shared(config, dtype.itemsize, target.max_shared)
        if config.block_n > max_block_n or config.shared_bytes(dtype.itemsize) > target.max_shared:
            continue
        if ctas > 1 and k > _LONG_K:
            rate *= _LONG_K_LOSS
        for split in (config, *_split(config, rows, n, k, target)):
            size, parts = split.block_m * split.block_n, split.splits
            reduction = (_SPLIT_WORK + _SPLIT_WORK_PER_SUM * size * parts) / k if parts > 1 else 0.0
            time = -(-split.tiles(rows, n) * parts // target.num_sms) * size / rate / parts + reduction
            if time < least:
                best, least = split, time
    return _scheduled(best, rows, target)


def _split(config: LinearConfig, rows: int, n: int, k: int, target: Target) -> list[LinearConfig]:
    """Split-K variants of `config`, for a long K."""
    counts = parts_at_once(config.tiles(rows, n), config.block_m * config.block_n, target) if k >= _LONG_K else []
    return [replace(config, splits=count) for count in counts]


def parts_at_once(tiles: int, size: int, target: Target) -> list[int]:
    """Numbers of split-K parts for `tiles` tiles of `size` sums: the most that run at once, down to half of that."""
    room = min(min(target.num_sms, MAX_PARTS) // tiles, MAX_SUMS // (tiles * size))
    return [count for count in SPLITS[1:] if room // 2 < count <= room]


def _scheduled(config: LinearConfig, rows: int, target: Target) -> LinearConfig:
    """`config` with PDL if each program has an SM to itself. Where programs share SMs, PDL would put two at a time on
    the first free SMs: on an H200 PDL made 64 x 128 tiles 8 to 14 % slower, and 128 x 128 tiles up to 11 % faster."""
    return replace(config, pdl=_uses_pdl(rows, target) and config.max_programs <= target.num_sms)


def _uses_pdl(rows: int, target: Target) -> bool:
    return target.capability >= 90 and rows <= PDL_MAX_ROWS


def linear_candidates(
    rows: int, n: int, k: int, dtype: torch.dtype, target: Target, *, max_block_n: int = 256
) -> list[LinearConfig]:
    """Tiles worth timing for a `[rows, k] x [n, k]` GEMM, including split-K and narrow tiles that share an SM."""
    shapes = (
        (64, 64, 64, 4, 4, 2), (64, 64, 128, 4, 3, 2), (64, 128, 64, 4, 4, 2), (128, 64, 64, 4, 4, 2),
        (128, 128, 64, 8, 3, 2), (128, 128, 64, 8, 4, 1), (128, 256, 64, 8, 3, 1),
    )  # fmt: skip
    found = []
    for bm, bn, bk, warps, stages, ctas in shapes:
        config = LinearConfig(bm, bn, bk, warps, stages, ctas * target.num_sms, copy_engine=target.has_copy_engine)
        config = _scheduled(config, rows, target)
        if bn <= max_block_n and not wrong_linear(config, target, dtype):
            found += [config, *_split(config, rows, n, k, target)]
    return found


def attention_candidates(rows: int, target: Target) -> list[AttentionConfig]:
    """Tiles worth timing over `rows` tokens. The tuner drops those that spill or that ptxas serialises."""
    shapes = ((64, 64, 4, 2, 3), (64, 64, 4, 3, 3), (64, 128, 4, 2, 2), (128, 64, 8, 2, 2), (128, 128, 8, 2, 1))
    more = {"copy_engine": target.has_copy_engine, "pdl": _uses_pdl(rows, target)}
    found = [AttentionConfig(*s[:4], s[4] * target.num_sms, **more) for s in shapes]
    return [config for config in found if not wrong_attention(config, target)]


def fit_shared(config: LinearConfig, itemsize: int, max_shared: int) -> LinearConfig:
    """`config` with as many stages as fit into `max_shared` bytes, at most its own number and at least two."""
    while config.num_stages > 2 and config.shared_bytes(itemsize) > max_shared:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def wrong_linear(config: LinearConfig, target: Target, dtype: torch.dtype) -> str:
    """Why `kernels.linear` cannot run `config` on `target`, or ""."""
    sides = (config.block_m, config.block_n, config.block_k)
    if any(side < 16 or side & (side - 1) for side in sides) or config.block_n < 32:
        return f"tile sides must be powers of two from 16 on, 32 for block_n; got {sides}"
    if config.splits not in SPLITS:
        return f"splits must be 1 to {SPLITS[-1]}, got {config.splits}"
    if config.shared_bytes(dtype.itemsize) > target.max_shared:
        return f"{config.shared_bytes(dtype.itemsize)} bytes of shared memory, limit {target.max_shared}"
    return _wrong_schedule(config, target)


def wrong_attention(config: AttentionConfig, target: Target) -> str:
    """Why `kernels.attention` cannot run `config` on `target`, or ""."""
    sides = (config.block_m, config.block_n)
    if any(side < 16 or side & (side - 1) for side in sides):
        return f"tile sides must be powers of two from 16 on, got {sides}"
    return _wrong_schedule(config, target)


def _wrong_schedule(config: LinearConfig | AttentionConfig, target: Target) -> str:
    """Why plain Triton cannot run the schedule of `config` on `target`, or ""."""
    if config.num_warps not in (1, 2, 4, 8, 16) or min(config.num_stages, config.max_programs) < 1:
        return f"num_warps, num_stages or max_programs out of range: {config}"
    if config.copy_engine != target.has_copy_engine:
        return f"copy_engine must be {target.has_copy_engine} on sm_{target.capability}"
    return f"PDL takes sm_90 or later, got sm_{target.capability}" if config.pdl and target.capability < 90 else ""


def attention_config(rows: int, head_dim: int, dtype: torch.dtype, target: Target) -> AttentionConfig:
    """Tile choice for varlen attention over `rows` packed tokens (a budget)."""
    sms, engine = target.num_sms, target.has_copy_engine
    if dtype.itemsize > 2:  # FMA units: rows of q and k are held in registers
        return AttentionConfig(16, 16, 8, 1, max_programs=4 * sms, max_head=64, copy_engine=engine)
    if not engine:
        if head_dim <= 80:
            return AttentionConfig(64, 64, 4, 2, max_programs=2 * sms, copy_engine=False)
        # Where shared memory is small, 32 keys: two programs an SM as FlashAttention 2 does on sm_86, and no spills.
        keys = 64 if target.max_shared > 100 << 10 else 32
        return AttentionConfig(128, keys, 8, 2, max_programs=2 * sms, copy_engine=False)
    if target.capability >= 100:
        found = AttentionConfig(64, 64, 8, 2, max_programs=2 * sms)
    elif head_dim > 80:  # 128 queries make ptxas serialise the products (C7515)
        found = AttentionConfig(64, 64, 4, 2, max_programs=2 * sms)
    else:
        found = AttentionConfig(64, 64, 4, 3, max_programs=3 * sms)
    return replace(found, pdl=_uses_pdl(rows, target))
