"""The heuristics: pure, alike within a budget, and never outside what the kernels and the devices can take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedvit.buffers import NARROWEST_TILE
from fusedvit.kernels.configs import LinearConfig, Target, attention_config, budget, fit_shared, ladder, linear_config

KIB = 1024
TARGETS = {  # as torch reports them
    "A100": Target(80, 108, 163 * KIB),
    "A10": Target(86, 72, 99 * KIB),
    "L40S": Target(89, 142, 99 * KIB),
    "H200": Target(90, 132, 227 * KIB),
    "B200": Target(100, 148, 227 * KIB),
    "RTX 5090": Target(120, 170, 99 * KIB),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
targets, dtypes = st.sampled_from(list(TARGETS.values())), st.sampled_from(DTYPES)
widths = st.sampled_from([16, 1024, 1152, 1280, 3456, 4304, 5120, 16384])


@pytest.mark.parametrize(
    "rows, expected", [(0, 64), (1, 64), (64, 64), (65, 80), (449, 512), (512, 512), (2049, 2560), (65536, 65536)]
)
def test_budget_is_the_next_of_four_an_octave(rows: int, expected: int) -> None:
    assert budget(rows) == expected


@pytest.mark.parametrize("rows, expected", [(513, 576), (784, 832), (1024, 1024), (1296, 1344), (1985, 2048)])
def test_budget_is_the_next_64_from_512_to_2048(rows: int, expected: int) -> None:
    assert budget(rows) == expected


def test_the_ladder_is_every_budget() -> None:
    assert tuple(ladder(64, 65536)) == tuple(sorted({budget(rows) for rows in range(65537)}))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 200_000).map(budget), widths, widths, dtypes, targets, st.sampled_from([64, 128, 256]))
def test_linear_config_fits(rows: int, n: int, k: int, dtype: torch.dtype, target: Target, widest: int) -> None:
    config = linear_config(rows, n, k, dtype, target, max_block_n=widest)
    assert config == linear_config(rows, n, k, dtype, target, max_block_n=widest)
    sides = (config.block_m, config.block_n, config.block_k)
    assert all(side >= 16 and side & (side - 1) == 0 for side in sides), "what tl.dot takes"
    assert config.block_n >= NARROWEST_TILE, "the statistics' buffer has no room for more parts"
    assert config.shared_bytes(dtype.itemsize) <= target.max_shared
    assert config.max_programs >= target.num_sms and config.num_stages >= 2
    assert config.block_n <= widest
    assert config.copy_engine == (target.capability >= 90)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200_000).map(budget), st.sampled_from([64, 72, 80, 96, 128]), dtypes, targets)
def test_attention_config_fits(rows: int, head_dim: int, dtype: torch.dtype, target: Target) -> None:
    config = attention_config(rows, 16, head_dim, dtype, target)
    assert config == attention_config(rows, 16, head_dim, dtype, target)
    sides = (config.block_m, config.block_n)
    assert all(side >= 16 and side & (side - 1) == 0 for side in sides), "what tl.dot takes"
    keys_and_values = 2 * config.num_stages * config.block_n * head_dim
    assert (config.block_m * head_dim + keys_and_values) * dtype.itemsize <= target.max_shared
    assert config.copy_engine == (target.capability >= 90)


def test_fit_shared_drops_stages_before_it_gives_up() -> None:
    config = LinearConfig(128, 128, 64, 8, 4)  # 32 KiB a stage in 16 bits, and 32 for the output
    assert fit_shared(config, 2, 227 * KIB).num_stages == 4
    assert fit_shared(config, 2, 130 * KIB).num_stages == 3
    assert fit_shared(config, 2, 99 * KIB).num_stages == 2
    assert fit_shared(config, 2, 10 * KIB).num_stages == 2


def test_target_of_no_gpu_is_the_default() -> None:
    assert Target.of(torch.device("cpu")) == Target()
