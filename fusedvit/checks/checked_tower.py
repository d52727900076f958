"""A tower that its weights are prepared from: whether it may run fused as it stands, and what it is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fusedvit.checks import fallback
from fusedvit.checks.as_built import is_as_built
from fusedvit.checks.change_detection import HOOK_REGISTRIES, Snapshot, fires
from fusedvit.errors import Reason
from fusedvit.families.base import Family
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights

FINGERPRINTED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class CheckedTower:
    """Implements `runtime.weight_cache.Source` for a Hugging Face tower."""

    tower: nn.Module
    family: Family
    spec: VisionSpec

    def reason(self) -> Reason | None:
        """Why the tower as it stands cannot run fused, or None."""
        return reason_of_tower(self.tower, self.family, self.spec)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every parameter by its name, shared ones under each of theirs."""
        return dict(self.tower.named_parameters(remove_duplicate=False))

    def prepare(self, parameters: Mapping[str, torch.Tensor], reuse: EncoderWeights | None) -> EncoderWeights:
        """Weights from `parameters`, in the memory of `reuse` where that fits."""
        return prepare(self.spec, self.family.names, self.family.source(parameters), reuse=reuse)

    def snapshot(self) -> Snapshot:
        """The tower's modules and parameters as they are now."""
        return Snapshot.of(self.tower)


def reason_of_tower(tower: nn.Module, family: Family, spec: VisionSpec) -> Reason | None:
    """Why `tower` as it stands cannot run fused, or None."""
    for name, module in tower.named_modules():
        if name and any(fires(getattr(module, registry)) for registry in HOOK_REGISTRIES):
            return Reason(fallback.HOOKS)
    if not is_as_built(tower, family, spec):
        return Reason(fallback.MODIFIED)
    return _reason_of_parameters(list(tower.parameters()))


def _reason_of_parameters(parameters: Sequence[torch.Tensor]) -> Reason | None:
    if any(p.device.type == "meta" for p in parameters):
        return Reason(fallback.META)
    if any(p.numel() and not p.untyped_storage().nbytes() for p in parameters if type(p) is nn.Parameter):
        return Reason(fallback.FREED)
    devices, dtypes = {p.device for p in parameters}, {p.dtype for p in parameters}
    if len(devices) > 1:
        return Reason(fallback.DEVICES)
    if len(dtypes) > 1:
        return Reason(fallback.DTYPES)
    device, dtype = next(iter(devices)), next(iter(dtypes))
    if not _device_runs(device):
        return Reason(fallback.UNSUPPORTED_DEVICE)
    supported = FINGERPRINTED if device.type == "cpu" else FINGERPRINTED[:3]
    if dtype not in supported:
        return Reason(fallback.UNSUPPORTED_DTYPE)
    return None if all(_is_dense(p) for p in parameters) else Reason(fallback.MODIFIED)


def _device_runs(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _is_dense(p: torch.Tensor) -> bool:
    return p.is_contiguous() or (p.ndim == 5 and p.is_contiguous(memory_format=torch.channels_last_3d))
