"""Prepared weights that stay true to a tower's parameters."""

from collections.abc import Callable

import torch
from torch import nn

from fusedvit.families.record import Family
from fusedvit.kernels.fingerprint import Watched
from fusedvit.ops import ops_for
from fusedvit.spec import VisionSpec
from fusedvit.watch import Snapshot, reason_of_tower
from fusedvit.weights import EncoderWeights, prepare


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
        self._watched: Watched | None = None
        self._reference: torch.Tensor | None = None

    def get(self) -> EncoderWeights:
        """The weights; made before by `make`."""
        assert self._weights is not None, "weights are made before a run"
        return self._weights

    def held_bytes(self) -> int:
        """Bytes of prepared copies."""
        return 0 if self._weights is None else self._weights.held_bytes()

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether weights exist, on the device and in the dtype of `parameter`."""
        if self._snapshot is None or self._weights is None:
            return False
        weight = self._weights.patch.weight
        return weight.device == parameter.device and weight.dtype == parameter.dtype

    def true(self) -> bool:
        """Whether modules and parameters are those the weights were made from (see `changed_flag` for the rest)."""
        return self._snapshot is not None and self._snapshot.same_structure() and self._snapshot.same_parameters()

    def reason(self) -> str | None:
        """Why the tower as it stands cannot run fused. If it cannot, whatever comes back is prepared anew."""
        found = reason_of_tower(self._tower)
        if found is not None:
            self._snapshot = None
        return found

    def changed_flag(self, device: torch.device) -> torch.Tensor | None:
        """`[1]` bool on the device: some parameter's content is not what was prepared. None before the first time."""
        if self._watched is None or self._reference is None:
            return None
        now = ops_for(device).fingerprint(self._watched, torch.empty_like(self._reference))
        return (now != self._reference).any().view(1)

    def make(self) -> None:
        """Makes weights, snapshot and fingerprint from the parameters as they are; waits for the GPU."""
        parameters = dict(self._tower.named_parameters())
        old = self._weights
        with torch.inference_mode(False), torch.no_grad():
            source = self._family.source(parameters)
            self._weights = prepare(self._spec, self._family.names, source, reuse=old)
            self._snapshot = Snapshot.of(self._tower)
            self._watched = Watched.of(list(parameters.values()))
            device = self._watched.pointers.device
            empty = torch.empty(len(parameters), dtype=torch.int32, device=device)
            self._reference = ops_for(device).fingerprint(self._watched, empty)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # whichever stream uses them next finds them written
        self.made += 1
        if old is not None and old.pointers() != self._weights.pointers():
            self._on_move()
