"""The heuristics: pure, alike within a budget, and never outside what the kernels and the devices can take."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedvit.kernels.tile_configs import (
    MAX_COUNTERS,
    MAX_SUMS,
    LinearConfig,
    Target,
    attention_config,
    budget,
    fit_shared,
    ladder,
    linear_candidates,
    linear_config,
    wrong_attention,
    wrong_linear,
)
from fusedvit.model.buffers import NARROWEST_TILE

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
    "rows, expected",
    [
        (0, 64),
        (1, 64),
        (64, 64),
        (65, 80),
        (449, 512),
        (512, 512),
        (2049, 2304),
        (4097, 4608),
        (6145, 6336),
        (6337, 6656),
        (8193, 10240),
        (65536, 65536),
    ],
)
def test_budget_is_the_next_of_four_per_octave(rows: int, expected: int) -> None:
    assert budget(rows) == expected


@pytest.mark.parametrize("rows, expected", [(513, 560), (561, 576), (784, 784), (785, 832), (1296, 1344), (2017, 2048)])
def test_budget_is_the_next_64_or_7_times_16_from_512_to_2048(rows: int, expected: int) -> None:
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
    assert not wrong_linear(config, target, dtype)
    assert_split_k_fits(config, rows, n, target)


def assert_split_k_fits(config: LinearConfig, rows: int, n: int, target: Target) -> None:
    if config.splits > 1:
        sums, counters = config.scratch_sizes(rows, n)
        assert sums <= MAX_SUMS and counters <= MAX_COUNTERS, "the encoder's scratch has no room"
        assert config.tiles(rows, n) * config.splits <= target.num_sms, "they run at once"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200_000).map(budget), widths, widths, targets)
def test_linear_candidates_fit(rows: int, n: int, k: int, target: Target) -> None:
    found = linear_candidates(rows, n, k, torch.bfloat16, target)
    assert len(set(found)) == len(found) > 0
    for config in found:
        assert not wrong_linear(config, target, torch.bfloat16)
        assert_split_k_fits(config, rows, n, target)


def test_few_rows_of_a_long_k_are_split() -> None:
    """fc2 of Qwen3-VL-8B: 256 rows are 36 tiles of 64 x 128 for 132 SMs; 4096 rows fill them."""
    splits = {rows: linear_config(rows, 1152, 4352, torch.bfloat16, TARGETS["H200"]).splits for rows in (256, 4096)}
    assert splits[256] > 1 == splits[4096]
    assert linear_config(256, 1152, 1152, torch.bfloat16, TARGETS["H200"]).splits == 1, "a short one is not worth it"
    assert linear_config(256, 1152, 4352, torch.float32, TARGETS["H200"]).splits == 1, "there is no scratch in fp32"


def test_why_a_configuration_cannot_run() -> None:
    config, target = LinearConfig(64, 64, 64, 4, 4, copy_engine=False), TARGETS["A100"]
    assert wrong_linear(config, target, torch.bfloat16) == ""
    assert wrong_linear(replace(config, splits=9), target, torch.bfloat16) == "splits must be 1 to 8, got 9"
    with_pdl = replace(config, pdl=True)
    assert wrong_linear(with_pdl, target, torch.bfloat16) == "PDL takes sm_90 or later, got sm_80"
    attention = replace(attention_config(256, 72, torch.bfloat16, target), pdl=True)
    assert wrong_attention(attention, target) == "PDL takes sm_90 or later, got sm_80"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200_000).map(budget), st.sampled_from([64, 72, 80, 96, 128]), dtypes, targets)
def test_attention_config_fits(rows: int, head_dim: int, dtype: torch.dtype, target: Target) -> None:
    config = attention_config(rows, head_dim, dtype, target)
    assert config == attention_config(rows, head_dim, dtype, target)
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
