"""What an engine captures of a tower, on graphs that need no GPU."""

import logging

import torch

from fusedvit.serving.served import Served
from tests.support.graphs_on_cpu import GRID, LIMITS, Case, answer, case, same  # noqa: F401  # a fixture
from tests.support.towers import Call

LOGGER = logging.getLogger("vllm.fusedvit")


def test_a_tower_that_wakes_captures_its_largest_graph_and_others_when_calls_need_them(case: Case) -> None:  # noqa: F811
    tower, handle, graphs = case
    served, pixels = Served(handle), Call.of(tower, GRID).pixels
    served.prepare("Tower", LOGGER)
    assert graphs.manager.stats.captures == len(LIMITS.token_budgets) and served.ready
    want = answer(tower, pixels, GRID)
    for lost in (False, True):
        served.give_back("woken", lost)
        assert graphs.encoder.held_bytes() == 0 and not served.ready
        before = graphs.manager.stats.captures
        served.prepare("Tower", LOGGER)
        assert graphs.manager.stats.captures == before + 1 and graphs.encoder.held_bytes() > 0
        assert same(answer(tower, pixels, GRID), want)
        assert graphs.manager.stats.captures == before + 2, "a call of 14 tokens captures the graph of 16"


def test_weights_that_are_written_anew_keep_their_graphs(case: Case) -> None:  # noqa: F811
    tower, handle, graphs = case
    served = Served(handle)
    served.prepare("Tower", LOGGER)
    before = graphs.manager.stats.captures
    with torch.no_grad():
        tower.blocks[0].mlp.linear_fc1.weight.mul_(1.1)
    served.changed("reloaded")
    served.prepare("Tower", LOGGER)
    assert graphs.manager.stats.captures == before and handle.stats()["refreshes"] == 2
