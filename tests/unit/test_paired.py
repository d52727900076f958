"""A deepstack merger beside the tower's last one: which, and what is launched for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedvit.graphs.side_stream import NoSideStream
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.tile_configs import Target
from fusedvit.kernels.tuning_table import Table
from fusedvit.model.merger_overlap import total_us
from fusedvit.model.ops import TORCH, Ops
from fusedvit.model.paired import paired
from fusedvit.model.plan import chosen_for
from fusedvit.runtime.ahead_of_time import QWEN3_VL_4B, QWEN3_VL_8B
from tests.support.branches import A100, BF16, H200, Forks, beside_of, buffers_for, outputs, planned
from tests.support.encoding import Encoder
from tests.support.towers import GRIDS, assert_bitwise, patches_of, pixels_for, vision_tower

on_hopper_alone = pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)
WITHOUT = replace(H200, without=(("linear/swap_ab", "off"),))
GRID, DEEPSTACK, DEPTH = GRIDS["mix"], (0, 1, 3), 5


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(vision_tower(depth=DEPTH, deepstack_visual_indexes=list(DEEPSTACK)), TORCH)


# what is planned


@on_hopper_alone
@pytest.mark.parametrize(
    ("rows", "target", "hidden"), [(784, WITHOUT, (0, 1)), (784, H200, ()), (1408, H200, ()), (2048, H200, ())]
)
def test_the_last_merger_in_line_is_paired(rows: int, target: Target, hidden: tuple[int, ...], on_hopper: None) -> None:
    plan = planned(rows, target=target)
    pair = plan.paired
    assert pair is not None and pair.merger == 2 and plan.apart == (*hidden, 2)
    assert (() if plan.beside is None else plan.beside.mergers) == hidden
    for ours, last in ((pair.fc1, pair.last_fc1), (pair.fc2, pair.last_fc2)):
        assert ours.max_programs == last.max_programs == H200.num_sms // 2 and ours.splits == last.splits == 1
        assert not ours.pdl and ours == replace(last, pdl=False)
    assert pair.last_fc1.pdl == plan.merger_fc1.pdl
    assert plan.of_deepstack(2).merger_fc1 == pair.fc1 and plan.of_last().merger_fc2 == pair.last_fc2
    chosen = chosen_for(QWEN3_VL_8B, rows, BF16, target, Table())
    layers = chosen["merger_fc1"], chosen["merger_fc2"]
    both_us = total_us([(layers[0][0], pair.fc1), (layers[1][0], pair.fc2)], replace(H200, num_sms=66))
    assert both_us < 2 * total_us(layers, H200) - 9
    assert plan == planned(rows, target=target) and plan.choices() == replace(plan, paired=None).choices()


@on_hopper_alone
@pytest.mark.parametrize(
    "other",
    [
        {"rows": 256},  # all are beside the blocks
        {"rows": 512, "spec": QWEN3_VL_4B, "target": WITHOUT},  # the one beside them is not done when these are
        {"rows": 4096},
        {"rows": 1408, "spec": replace(QWEN3_VL_8B, deepstack=(26,))},  # the last merger reads the same stream
        {"rows": 1408, "spec": replace(QWEN3_VL_8B, tail="downsample", merger_size=4096)},
        {"rows": 1408, "dtype": torch.float32},
        {"rows": 1408, "target": A100},
    ],
    ids=[
        "few rows",
        "a late merger",
        "many rows",
        "after the last block",
        "another last merger",
        "fp32",
        "another GPU",
    ],
)
def test_else_none_is(other: dict[str, Any], on_hopper: None) -> None:
    plan = planned(**other)
    assert plan.paired is None and plan.of_last() is plan


@on_hopper_alone
def test_one_that_would_wait_for_others_is_not(on_hopper: None) -> None:
    chosen, plan = chosen_for(QWEN3_VL_8B, 784, BF16, WITHOUT, Table()), planned(784, target=WITHOUT)
    hidden = plan.beside
    assert hidden is not None and hidden.late_us == 0
    assert paired(QWEN3_VL_8B, chosen, BF16, WITHOUT, hidden) == plan.paired is not None
    assert paired(QWEN3_VL_8B, chosen, BF16, WITHOUT, replace(hidden, late_us=50.0)) is None


# what is launched


class Noted(Forks):
    """Notes each launch of a linear layer: whether forked, what it reads and its configuration; and each fork."""

    def __init__(self) -> None:
        self.launches: list[tuple[bool, torch.Tensor, Any]] = []
        self.ops: Ops = replace(TORCH, linear=self._linear)

    def _linear(self, *given: Any) -> Any:
        self.launches.append((self.forking, given[0], given[5]))
        return TORCH.linear(*given)


def test_it_is_forked_at_the_tail_and_reads_what_its_block_wrote(encoder: Encoder) -> None:
    """The last of three, of which the first is beside the blocks and the second in line."""
    plan, noted = beside_of(encoder.plan(patches_of(GRID)), (0,), 2), Noted()
    buffers = buffers_for(encoder, GRID, 2)
    encoder.load(buffers, GRID, pixels_for(vision_tower(), GRID))
    outputs(encoder, buffers, plan, noted, noted.ops)
    forked = [i for i, (fork, *_) in enumerate(noted.launches) if fork]
    patch, in_line, block, merger = 1, 2, 4, 2
    first, tail = patch + block, patch + DEPTH * block + merger + in_line
    assert forked == [first, first + 1, tail, tail + 1] and len(noted.launches) == tail + 2 * merger
    assert buffers.apart is not None and plan.paired is not None
    x, inner = noted.launches[tail][1], noted.launches[tail + 1][1]
    assert x.data_ptr() == buffers.apart.hidden[1].data_ptr() and inner.data_ptr() == buffers.apart.inner.data_ptr()
    pair, configs = plan.paired, [config for *_, config in noted.launches]
    assert configs[tail:] == [pair.fc1, pair.fc2, pair.last_fc1, pair.last_fc2]


@pytest.mark.parametrize("hidden", [(), (0,), (0, 1)])
def test_outputs_are_those_of_mergers_in_line(encoder: Encoder, hidden: tuple[int, ...]) -> None:
    usual = encoder.plan(patches_of(GRID))
    answers = []
    for plan in (beside_of(usual, hidden, 2), usual):
        buffers = buffers_for(encoder, GRID, len(plan.apart))
        encoder.load(buffers, GRID, pixels_for(vision_tower(), GRID))
        answers.append(outputs(encoder, buffers, plan, NoSideStream()))
    assert_bitwise(*answers)
    assert bool(answers[0]["merged"].isfinite().all())


@pytest.mark.parametrize("name", ["hidden", "stats"])
def test_a_stream_that_is_not_kept_would_be_seen(encoder: Encoder, name: str) -> None:
    plan = beside_of(encoder.plan(patches_of(GRID)), (), 2)
    buffers, answers = buffers_for(encoder, GRID, 1), []
    assert buffers.apart is not None
    common = replace(buffers, apart=replace(buffers.apart, **{name: getattr(buffers, name)[None]}))
    for given in (buffers, common):
        encoder.load(given, GRID, pixels_for(vision_tower(), GRID))
        answers.append(outputs(encoder, given, plan, NoSideStream())["merged"])
    same = [torch.equal(ours, theirs) for ours, theirs in zip(*answers, strict=True)]
    assert same == [True, True, True, False]
