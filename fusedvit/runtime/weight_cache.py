"""Prepared weights, kept in step with a tower's parameters."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from fusedvit.errors import Reason
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.readback import ContentCheck, ReadBack, StreamMark


class Snapshot(Protocol):
    """A tower's modules and parameters at one moment."""

    def first_parameter(self) -> torch.Tensor | None:
        """What is now where the first parameter was."""

    def unchanged(self) -> bool:
        """Whether the tower has these modules and parameters still; their content is not read."""


class Source(Protocol):
    """The tower that weights are prepared from, as `fusedvit.checks` sees it."""

    def reason(self) -> Reason | None:
        """Why the tower as it stands cannot run fused, or None."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every parameter by its name."""

    def prepare(self, parameters: Mapping[str, torch.Tensor], reuse: EncoderWeights | None) -> EncoderWeights:
        """Weights from `parameters`, in the memory of `reuse` where that fits."""

    def snapshot(self) -> Snapshot:
        """The tower as it stands."""


class WeightCache:
    """Weights prepared when first needed, and again when the tower has changed.

    Attributes:
        version: how often they were prepared. A run that began with an older version is not accepted.
    """

    def __init__(self, source: Source, on_move: Callable[[], None]) -> None:
        """`on_move` is called when tensors that a captured graph points to are no longer the ones in use."""
        self.version = 0
        self._source = source
        self._on_move = on_move
        self._snapshot: Snapshot | None = None
        self._weights: EncoderWeights | None = None
        self._content: ContentCheck | None = None

    def get(self) -> EncoderWeights:
        """The prepared weights; `prepare` comes first."""
        assert self._weights is not None, "weights are prepared before a run"
        return self._weights

    def held_bytes(self) -> int:
        """Bytes of prepared copies."""
        return 0 if self._weights is None else self._weights.held_bytes()

    def first_parameter(self) -> torch.Tensor:
        """A parameter, for its device and dtype: without a walk of the tower where weights are prepared.

        In a tower that has changed since it may be an old one; `read_back` notices that.
        """
        found = None if self._snapshot is None else self._snapshot.first_parameter()
        return next(iter(self._source.parameters().values())) if found is None else found

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether weights are prepared, on the device and in the dtype of `parameter`."""
        if self._snapshot is None or self._weights is None:
            return False
        weight = self._weights.patch.weight
        return weight.device == parameter.device and weight.dtype == parameter.dtype

    def mark(self) -> StreamMark | None:
        """Where the current stream of the weights' GPU is, for `read_back`; None on a CPU."""
        content = self._content
        return None if content is None or content.marks is None else content.marks.here()

    def read_back(self, mark: StreamMark | None, check_content: bool, grid: torch.Tensor | None) -> ReadBack:
        """Whether the weights are still those of the tower, and the rows of `grid`: one host read at most.

        The read runs on a stream of its own, overlapped with whatever was launched since `mark`; modules and parameters
        are compared on the host meanwhile.

        Args:
            mark: the point in the caller's stream that the read waits for; None on a CPU, or where nothing is read.
            check_content: compare fingerprints of the parameters' content.
            grid: `[n, 3]` on the weights' device; None if there is none to read.
        """
        assert self._content is not None, "weights are prepared before a run"
        if not check_content and grid is None:
            return ReadBack(self._unchanged(), [])
        return self._content.begin(mark, check_content, grid).wait(self._unchanged)

    def _unchanged(self) -> bool:
        return self._snapshot is not None and self._snapshot.unchanged()

    def prepare(self) -> Reason | None:
        """Prepares weights from the tower as it stands, or says why it cannot run fused; waits for the GPU.

        Every way to prepared weights leads through here: the tower is checked first.
        """
        reason = self._source.reason()
        if reason is not None:
            self._snapshot = None  # whatever comes back is prepared anew
            return reason
        parameters = self._source.parameters()
        old = self._weights
        with torch.inference_mode(False), torch.no_grad():
            weights = self._source.prepare(parameters, old)
            snapshot = self._source.snapshot()
            content = ContentCheck.of(list(parameters.values()))
        device = weights.patch.weight.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # whichever stream uses them next finds them written
        self.version += 1  # before the rest: a run that began earlier is not accepted
        self._weights, self._content, self._snapshot = weights, content, snapshot
        if old is not None and old.pointers() != weights.pointers():
            self._on_move()
        return None
