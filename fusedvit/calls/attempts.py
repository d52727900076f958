"""One call's attempts: a call runs again until the weights were the same before and after a run."""

from collections import Counter
from collections.abc import Callable

import torch

from fusedvit.calls.pauses import Pause
from fusedvit.checks import fallback
from fusedvit.errors import Reason, WeightsReleased
from fusedvit.kernels.launch import KernelFailed
from fusedvit.kernels.load_inputs import FLOATS, kind_of
from fusedvit.prepared_tower import INSIDE_CAPTURE, PreparedTower
from fusedvit.runtime.inputs import Grid, Inputs, check_inputs
from fusedvit.runtime.kernel_loader import KernelsNotReady
from fusedvit.runtime.runner import on_device
from fusedvit.runtime.speculative_replay import Attempt, SpeculativeReplay, attempt

OVERTAKEN = 3  # runs of a call before it takes the lock that stops other threads from preparing weights
MOST_RUNS = 8  # further runs under that lock
MOST_REPEATS = 3  # preparations in a row from new parameter objects of the same values, before a pause begins

# What a run may raise if the tower changes meanwhile. A timeout that a signal's handler raises is not among these.
_OF_PYTHON = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)
_FAILS = (*_OF_PYTHON, KernelsNotReady, KernelFailed)


class Attempts:
    """The attempts at the calls of one tower.

    Attributes:
        pause: whether the next calls make no attempt, because preparing weights did not pay off for calls before.
    """

    def __init__(self, prepared: PreparedTower, eager_runs: Counter[str]) -> None:
        """
        Args:
            eager_runs: counts runs outside a graph, by reason.
        """
        self.pause = Pause()
        self._prepared, self._weights, self._eager_runs = prepared, prepared.weights, eager_runs

    def of_call(
        self,
        pixels: torch.Tensor,
        grid_thw: Grid,
        replay: SpeculativeReplay | None,
        marked: bool,
        check_content: bool,
    ) -> Attempt | Reason:
        """Runs a call, or returns the reason why it cannot run fused.

        Args:
            pixels, grid_thw: as the tower's `forward` got them, or pixels of bytes as the weights take them.
            replay: what was begun of this call, if anything.
            marked: `pixels` holds bytes.
            check_content: whether to compare the content of the tower's parameters.
        """
        before = self._weights.preparations
        try:
            found = self._until_unchanged(pixels, grid_thw, replay, marked, check_content)
            self._note_preparations(found, self._weights.preparations != before)
        except (KernelsNotReady, KernelFailed) as why:
            return Reason(fallback.NOT_READY, str(why))
        return found

    def _until_unchanged(
        self,
        pixels: torch.Tensor,
        grid_thw: Grid,
        replay: SpeculativeReplay | None,
        marked: bool,
        check_content: bool,
    ) -> Attempt | Reason:
        """Repeats a call until the weights are unchanged over one run, or returns the reason why it cannot run fused.

        A thread that refreshes weights in a loop could overtake every run, so the last runs hold a lock against it.
        """
        prepared, parameter, once = self._prepared, self._weights.first_parameter(), self.pause.again
        most, most_alone = (1, 1) if once else (OVERTAKEN, MOST_RUNS)
        with on_device(parameter.device):
            kind = kind_of(pixels, prepared.spec.patch_width) if marked else FLOATS
            reason = prepared.ensure_weights(parameter, kind)
            if reason is not None:
                return reason
            inputs = check_inputs(pixels, grid_thw, prepared.spec, parameter, marked)
            if isinstance(inputs, Reason):
                return inputs
            found = self._often(inputs, replay, check_content, most, prepared.prepare)
            if found is None:
                with prepared.nothing_launched():
                    found = self._often(inputs, None, check_content, most_alone, prepared.prepare_now)
        if found is None:
            runs = most + most_alone
            found = Reason(fallback.CHANGED_DURING_CALL, f"other weights after each of {runs} runs than before it")
        return found

    def _often(
        self,
        inputs: Inputs,
        replay: SpeculativeReplay | None,
        check_content: bool,
        most: int,
        prepare: Callable[[int], Reason | None],
    ) -> Attempt | Reason | None:
        """As `_until_unchanged`; None if the weights changed during each of `most` runs."""
        for _ in range(most):
            found = self._once(inputs, replay, check_content)
            if isinstance(found, Reason) or found.unchanged:
                return found
            replay, reason = None, prepare(found.weights_version)
            if reason is not None:
                return reason
        return None

    def _once(self, inputs: Inputs, replay: SpeculativeReplay | None, check_content: bool) -> Attempt | Reason:
        """Runs a call once. A run whose weights are released meanwhile counts as a run on changed weights, and so does
        a run that raises after the tower has changed."""
        version = self._weights.version if replay is None else replay.weights_version
        try:
            runtime = self._prepared.runtime_on(self._weights.first_parameter())
            check_content = check_content and runtime.no_graphs != INSIDE_CAPTURE
            return attempt(runtime, inputs, replay, version, check_content, self._eager_runs)
        except WeightsReleased:
            return Attempt(None, [], version, unchanged=False)
        except _FAILS:
            if self._weights.host_unchanged():
                raise
            return Attempt(None, [], version, unchanged=False)

    def _note_preparations(self, found: Attempt | Reason, prepared: bool) -> None:
        """Begins a pause if this call, like the calls before it, prepared weights that no later call could use: the
        three cases under "Calls pause" in docs/using.md.

        Args:
            found: what the call returned.
            prepared: whether weights were prepared during the call, by it or by another thread.
        """
        if not isinstance(found, Reason) and not prepared:
            self._weights.repeats = 0
            self.pause.holds()
            return
        if self._prepared.config.strict:
            return
        each = self.pause.prepares(self._weights.changes)
        if isinstance(found, Reason) and found.kind == fallback.CHANGED_DURING_CALL:
            self.pause.begin(found)
        elif self._weights.repeats >= (1 if self.pause.again else MOST_REPEATS):
            self.pause.begin(Reason(fallback.REPLACED_BETWEEN_CALLS, "other objects of the same values at each call"))
            self._prepared.release()  # an offloaded tower is meant to hold no GPU memory
        elif each:
            self.pause.begin(Reason(fallback.CHANGED_BETWEEN_CALLS, "new values or adapters at each call"))
