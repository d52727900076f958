"""Runs the encoder on the meta device to find the kernels that it launches, without memory and without a GPU."""

from collections.abc import Callable

import torch

from fusedvit.graphs.limits import Limits
from fusedvit.kernels.fingerprint import FingerprintSources
from fusedvit.kernels.launch import pause
from fusedvit.kernels.load_inputs import GRID_DTYPES
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.buffers import Capacity, allocate
from fusedvit.model.encoder import encode
from fusedvit.model.items import Item
from fusedvit.model.ops import TRITON
from fusedvit.model.plan import EncoderPlan, heuristic, known_plan, tasks
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.captured_encoder import CapturedEncoder, rehearse_padded
from fusedvit.runtime.kernel_loader import AROUND, META, Run


class MetaRuns:
    """Makes the launches of a tower's runs on the meta device."""

    def __init__(
        self, spec: VisionSpec, dtype: torch.dtype, limits: Limits | None, target: Callable[[], Target]
    ) -> None:
        """
        Args:
            limits: the limits of the graphs; None if there are no graphs.
            target: called at each run, as a backend that fails is no longer part of the target.
        """
        self._spec, self._dtype, self._limits, self._target = spec, dtype, limits, target
        self._encoder: tuple[Target, CapturedEncoder] | None = None
        self._weights: EncoderWeights | None = None

    def launch(self, run: Run, weights: EncoderWeights) -> None:
        """Launches the kernels of `run` and those that every call launches around it; for `AROUND`, only the latter."""
        fingerprints_on_meta()
        if self._spec.padded:
            rehearse_padded(self._spec, TRITON, self._dtype, META)
        if run == AROUND:
            return
        if run.graph_budget:
            self._weights = weights
            encoder = self._captured()
            encoder.rehearse(run.graph_budget)
            self._weights = None
        else:
            plan = known_plan(self._spec, run.eager_patch_tokens, self._dtype, self._target())
            run_on_meta(self._spec, weights, plan, self._dtype, run.eager_patch_tokens)

    def _captured(self) -> CapturedEncoder:
        target, known = self._target(), self._encoder
        if known is not None and known[0] == target:
            return known[1]

        def planner(spec: VisionSpec, tokens: int, dtype: torch.dtype, _: Target) -> EncoderPlan:
            gpu = self._target()  # without backends that have failed since
            for task in tasks(spec, tokens, dtype):  # a heuristic may take 30 ms; its result is cached
                pause()
                heuristic(task, dtype, gpu)
            return known_plan(spec, tokens, dtype, gpu)

        def weights() -> EncoderWeights:
            assert self._weights is not None, "called within `launch`"
            return self._weights

        assert self._limits is not None, "graphs have limits"
        encoder = CapturedEncoder(self._spec, TRITON, self._dtype, META, weights, planner=planner)
        encoder.allocate(self._limits)
        self._encoder = target, encoder
        return encoder


def run_on_meta(spec: VisionSpec, weights: EncoderWeights, plan: EncoderPlan, dtype: torch.dtype, tokens: int) -> None:
    """Runs `plan` eagerly on `tokens` patch tokens, as a rehearsal that launches each kernel once (see `encode`)."""
    side = spec.merge_size
    wide = tokens // side**2 * side - side
    items = [Item(1, side, wide), Item(1, side, side)]  # one frame for each list of tiles
    buffers = allocate(spec, Capacity.of(items, plan.layout(spec)), dtype, META)
    with torch.no_grad():
        encode(spec, weights, buffers, TRITON, plan, rehearsal=True)


def fingerprints_on_meta() -> None:
    """Launches the fingerprint of the weights, without a grid and with a grid of each dtype."""
    words = torch.empty(1, dtype=torch.int64, device=META)
    sources = FingerprintSources((), words, words)
    TRITON.fingerprint(sources, words.int())
    for dtype in GRID_DTYPES:
        grid = torch.empty(1, 3, dtype=dtype, device=META)
        TRITON.fingerprint(sources, words.int(), grid, grid.long())
