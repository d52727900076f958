"""One call over several GPUs: each has a copy of the tower, and encodes a share of the images and video frames."""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from fusedvit.api import call_original, fuse
from fusedvit.checks.change_detection import HANDLE
from fusedvit.checks.find_tower import find_tower
from fusedvit.checks.ownership import own_class
from fusedvit.checks.recorded import REGISTRIES, content_of
from fusedvit.config import FuseConfig
from fusedvit.errors import first_line
from fusedvit.fused_encoder import rows_of
from fusedvit.outputs.hugging_face import side_by_side
from fusedvit.runtime.inputs import Grid, check_grid
from fusedvit.runtime.item_shares import Share, in_order, shares_of

MOST_RUNS = 3  # runs of a call during which the tower changes, before it runs on the tower's own GPU alone


class DataParallelEncoder:
    """A model's vision tower on several GPUs: `DataParallelEncoder(model, ["cuda:0", "cuda:1"])(pixel_values, grid)`.

    The model's tower is fused in place and encodes a share itself. Each other device holds a copy of the tower (in
    bf16, Qwen3-VL-8B's takes 1.1 GiB, and its prepared weights as much again). Copies follow the tower's weights and
    whatever else it computes with, such as the choice of adapters: a call that finds a change updates the copies and
    runs again. A call that cannot run fused runs the original code on the tower's own device alone. Items are balanced
    by load, and videos are cut between frames, which changes no bit of the outputs.

    Args:
        model: as for `fuse`.
        devices: at least one. On the tower's own device the tower itself runs, not a copy.
        config: as for `fuse`.

    Raises:
        UnsupportedModel: as `fuse`.
        TypeError: as `fuse`, or `devices` is not a list of devices.
        ValueError: no devices are given, or one does not exist here, or is neither a CPU nor a GPU.
    """

    def __init__(
        self, model: nn.Module, devices: Sequence[str | torch.device], config: FuseConfig | None = None
    ) -> None:
        others = _devices_of(devices)
        self._handle = fuse(model, config)
        self._tower = find_tower(model)
        own = self._handle.weights.first_parameter().device
        if own in others:
            others.remove(own)
        self._copies = [_Copy(self._tower, device, self._handle.config) for device in others]
        self._synced = -1  # the version of the tower's weights that the copies hold
        self._pool = ThreadPoolExecutor(max(1, len(others)), thread_name_prefix="fusedvit-device")

    def __call__(self, pixel_values: torch.Tensor, grid_thw: Grid) -> torch.Tensor:
        """The tower's rows, as `FusedEncoder.concatenated` gives them, on the tower's device.

        Args:
            pixel_values, grid_thw: as the tower takes them.

        Returns:
            `[tokens, (1 + n) * out]` in the caller's order.

        Raises:
            TypeError, ValueError, RuntimeError: as a call of the tower.
        """
        grid = check_grid(grid_thw).cpu()
        for _ in range(MOST_RUNS):
            if not self._bring_copies_up_to_date():
                break
            shares = self._shares_of(pixel_values, grid)
            if shares is None:
                break
            found = self._run(pixel_values, shares)
            if self._handle.state() != "fused":  # `concatenated` raises the error
                break
            if found is None:  # the handle has counted this call as a fallback
                return rows_of(call_original(self._tower, pixel_values, grid, return_dict=True))
            if self._handle.weights.version == self._synced:
                return found
        return self._handle.concatenated(pixel_values, grid)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("fusedvit: a DataParallelEncoder cannot be copied or pickled: copy its model, and make another")

    def close(self) -> None:
        """Frees the copies; the model stays fused."""
        self._pool.shutdown()
        self._copies.clear()

    def _bring_copies_up_to_date(self) -> bool:
        """Returns False if there are no weights to copy: the tower cannot run fused and never has, or just changed."""
        if self._synced < 0:
            if self._handle.state() == "fused" and self._handle.reason() is not None:
                return False
            self._handle.refresh()
        weights = self._handle.weights
        version = weights.version
        if version != self._synced and weights.host_unchanged():  # a changed tower must be judged first
            for copied in self._copies:
                copied.take(self._tower)
            self._synced = version
        return version == self._synced

    def _shares_of(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> list[Share] | None:
        """The share of each device, the tower's own first; None for inputs whose error the tower should raise."""
        if not isinstance(pixel_values, torch.Tensor) or pixel_values.ndim != 2:
            return None
        return shares_of(self._handle.spec, len(pixel_values), grid, 1 + len(self._copies))

    def _run(self, pixel_values: torch.Tensor, shares: list[Share]) -> torch.Tensor | None:
        """The gathered rows, or None if this call must take the tower's original code."""
        others = [
            self._pool.submit(copied.run, pixels.to(copied.device, non_blocking=True), share.grid, stream)
            for copied, share in zip(self._copies, shares[1:], strict=True)
            if share.pieces
            for pixels, stream in [(share.pixels_of(pixel_values), _stream_on(copied.device))]
        ]
        own = None
        try:
            own = self._handle(self._tower, shares[0].pixels_of(pixel_values), shares[0].grid, {})
        finally:
            rows = [other.result() for other in others]  # also if the tower raises: no copy still runs after the call
        if own is None:
            return None
        ran = [shares[0], *(share for share in shares[1:] if share.pieces)]
        return in_order(ran, [side_by_side(own, self._handle.spec), *rows])


class _Copy:
    """A fused copy of a tower on another device."""

    def __init__(self, tower: nn.Module, device: torch.device, config: FuseConfig) -> None:
        self.device = device
        self._config = config
        self._build(tower)

    def _build(self, tower: nn.Module) -> None:
        memo: dict[int, object] = {}
        for tensor in _tensors_of(tower):
            moved = tensor.detach().to(self.device, copy=True)
            memo[id(tensor)] = nn.Parameter(moved, False) if isinstance(tensor, nn.Parameter) else moved
        self._tower = copy.deepcopy(tower, memo)
        self._handle = fuse(self._tower, self._config)

    def take(self, tower: nn.Module) -> None:
        """Updates this copy from `tower`: in place if modules and tensor shapes are the same, else by a new copy."""
        if _structure_of(self._tower) != _structure_of(tower):
            self._build(tower)
            return
        pairs = [*zip(self._tower.modules(), tower.modules(), strict=True)]
        memo: dict[int, object] = {id(theirs): mine for mine, theirs in pairs}
        with torch.no_grad():
            for mine, theirs in zip(_tensors_of(self._tower), _tensors_of(tower), strict=True):
                mine.copy_(theirs)
                memo[id(theirs)] = mine
        for own, other in pairs:
            _take_attributes(vars(own), nn.Module.__getstate__(other), memo)

    def run(self, pixels: torch.Tensor, grid: torch.Tensor, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """The rows of a share whose pixels are on this device, computed in `stream`, the caller's on this device."""
        with torch.inference_mode(), torch.cuda.stream(stream):  # None changes no stream
            found = self._handle(self._tower, pixels, grid, {})  # bypasses hooks on the tower, as the own share does
            if found is None:
                return rows_of(call_original(self._tower, pixels, grid, return_dict=True))
            return side_by_side(found, self._handle.spec)


def _devices_of(given: Sequence[str | torch.device]) -> list[torch.device]:
    expected = "devices must name at least one device, as ['cuda:0', 'cuda:1'] does"
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"fusedvit: {expected}, got {given!r}")
    if not given:
        raise ValueError(f"fusedvit: {expected}, got {given!r}")
    return [_device_of(name) for name in given]


def _device_of(name: str | torch.device) -> torch.device:
    if not isinstance(name, str | torch.device):
        raise TypeError(f"fusedvit: devices must hold names of devices, as 'cuda:0', got {name!r}")
    try:
        found = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch raises these for devices that it does not have
        raise ValueError(f"fusedvit: devices: no device {name!r} here: {first_line(error)}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"fusedvit: devices must be CPUs and NVIDIA GPUs, got {str(name)!r}")
    return found


def _tensors_of(tower: nn.Module) -> list[torch.Tensor]:
    return [*tower.parameters(), *tower.buffers()]


def _structure_of(tower: nn.Module) -> list[object]:
    """Modules, parameters and buffers in order, without content, and numbers that tell which are the same object."""
    numbers: dict[int, int] = {}
    found: list[object] = []
    for path, module in tower.named_modules(remove_duplicate=False):
        found.append((path, own_class(type(module)), numbers.setdefault(id(module), len(numbers))))
        for registry in (module._parameters, module._buffers):
            tensors = {name: t for name, t in registry.items() if t is not None}
            found.append([(n, t.shape, t.dtype, numbers.setdefault(id(t), len(numbers))) for n, t in tensors.items()])
    return found


def _take_attributes(mine: dict[str, Any], theirs: dict[str, Any], memo: dict[int, object]) -> None:
    """Copies attributes of an original module to its copy: numbers, flags, hooks, an adapter's scale.

    Args:
        mine: attributes of the copy, changed in place.
        theirs: attributes of the original as its `__getstate__` gives them, without what was compiled for the original.
        memo: maps ids of the original's modules and tensors to the copy's, as for `copy.deepcopy`.
    """
    others = {*REGISTRIES, HANDLE}  # registries of modules and tensors, and the tower's handle, are not copied
    for name in mine.keys() - theirs.keys() - others:
        del mine[name]
    for name in theirs.keys() - others:
        value = theirs[name]
        if name not in mine or content_of(mine[name]) != content_of(value):
            mine[name] = copy.deepcopy(value, memo)


def _stream_on(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
