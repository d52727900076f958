"""What a replay of a tower costs, before anybody measured it."""

from fusedvit.graphs.cost import CostModel
from fusedvit.graphs.limits import Limits
from fusedvit.model.spec import VisionSpec

# Measured on an H200 with Qwen3-VL-8B's tower in bf16; only their proportion matters.
US_PER_LAUNCH = 10.0  # of a kernel with next to nothing to do
TERAFLOPS = 300.0  # of a replay as a whole, attention's share of the time included


def expected_cost(spec: VisionSpec, limits: Limits) -> CostModel:
    """A cost model from the tower's launches and the products of its linear layers. Pure: the same plan every time."""
    mergers = 1 + len(spec.deepstack)
    launches = 2 + 5 * spec.depth + 3 * mergers
    block = 4 * spec.hidden_size**2 + 2 * spec.hidden_size * spec.intermediate_size
    patch = spec.patch_width * spec.hidden_size + spec.depth * block
    merger = spec.merged_size * (spec.merged_size + spec.out_size)
    flops = 2 * (spec.merge_unit * patch + mergers * merger)  # of a merged token
    return CostModel.even(limits, US_PER_LAUNCH * launches, flops / TERAFLOPS / 1000)
