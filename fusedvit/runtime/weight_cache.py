"""Prepared weights that stay true to a tower's parameters."""

from collections.abc import Callable

import torch
from torch import nn

from fusedvit.checks.change_detection import Snapshot, reason_of_tower
from fusedvit.families.base import Family
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.readback import Content, Look, Mark


class PreparedWeights:
    """Made from the parameters when first needed, and again when they have changed.

    `on_move` is called when tensors that a captured graph points to are no longer the ones in use.
    """

    def __init__(self, tower: nn.Module, family: Family, spec: VisionSpec, on_move: Callable[[], None]) -> None:
        self.made = 0
        self._tower = tower
        self._family = family
        self._spec = spec
        self._on_move = on_move
        self._snapshot: Snapshot | None = None
        self._weights: EncoderWeights | None = None
        self._content: Content | None = None

    def get(self) -> EncoderWeights:
        """The weights; made before by `make`."""
        assert self._weights is not None, "weights are made before a run"
        return self._weights

    def held_bytes(self) -> int:
        """Bytes of prepared copies."""
        return 0 if self._weights is None else self._weights.held_bytes()

    def parameter(self) -> torch.Tensor:
        """A parameter, for its device and dtype: of the tower as the weights were made from it, without a walk of it.

        In a tower that has changed since it may be an old one; `true` sees that.
        """
        found = None if self._snapshot is None else self._snapshot.first_parameter()
        return next(self._tower.parameters()) if found is None else found

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether weights exist, on the device and in the dtype of `parameter`."""
        if self._snapshot is None or self._weights is None:
            return False
        weight = self._weights.patch.weight
        return weight.device == parameter.device and weight.dtype == parameter.dtype

    def true(self) -> bool:
        """Whether modules and parameters are those the weights were made from; `same_content` sees what this cannot."""
        return self._snapshot is not None and self._snapshot.same_structure() and self._snapshot.same_parameters()

    def reason(self) -> str | None:
        """Why the tower as it stands cannot run fused. If it cannot, whatever comes back is prepared anew."""
        found = reason_of_tower(self._tower, self._family, self._spec)
        if found is not None:
            self._snapshot = None
        return found

    def mark(self) -> Mark | None:
        """Where the current stream of the weights' GPU is, to `look` from once; None on a CPU."""
        content = self._content
        return None if content is None or content.marks is None else content.marks.here()

    def look(self, begin: Mark | None, watch: bool, grid: torch.Tensor | None) -> Look:
        """Asks whether the parameters held at `begin` what they held when the weights were made, and for `grid`'s rows.

        One host read, which `Look.done` waits for, on a stream of its own beside whatever was launched since; it waits
        for nothing later than `begin`.

        Args:
            begin: a `mark`; None on a CPU.
            watch: without, the parameters count as unchanged.
            grid: `[n, 3]` on the weights' device; None if there is none to read.
        """
        assert self._content is not None, "weights are made before a run"
        return self._content.look(begin, watch, grid)

    def make(self) -> None:
        """Makes weights, snapshot and fingerprints from the parameters as they are; waits for the GPU."""
        parameters = dict(self._tower.named_parameters(remove_duplicate=False))
        old = self._weights
        with torch.inference_mode(False), torch.no_grad():
            weights = prepare(self._spec, self._family.names, self._family.source(parameters), reuse=old)
            snapshot = Snapshot.of(self._tower)
            content = Content.of(list(parameters.values()))
        device = weights.patch.weight.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # whichever stream uses them next finds them written
        self.made += 1  # before the rest: a run that began earlier is not accepted
        self._weights, self._content, self._snapshot = weights, content, snapshot
        if old is not None and old.pointers() != self._weights.pointers():
            self._on_move()
