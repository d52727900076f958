"""One call over several GPUs: each has a copy of the tower, and takes a share of the images and video frames."""

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

MOST_RUNS = 3  # of a call during which the tower changes, before it runs on the tower's own GPU alone


class DataParallelEncoder:
    """A model's vision tower on several GPUs: `DataParallelEncoder(model, ["cuda:0", "cuda:1"])(pixel_values, grid)`.

    The model's tower is fused in place and takes part. The other devices hold copies of it (in bf16 Qwen3-VL-8B's takes
    1.1 GiB and as much again for what is prepared), which follow its weights and whatever else it computes by, as the
    choice of adapters: when a call finds a change, copies are brought up to date and the call is run again. What cannot
    run fused runs on the tower's own device alone, in the original code. Items are balanced by their load, and videos
    are cut between frames, which changes no bit.

    Args:
        model: as `fuse` takes it.
        devices: at least one; the one that the tower lies on serves through the tower itself.
        config: as `fuse` takes it.

    Raises:
        UnsupportedModel: as `fuse`.
        TypeError: as `fuse`, or `devices` is no list of devices.
        ValueError: no devices, or one that is not here, or neither a CPU nor a GPU.
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
        self._synced = -1  # the version of the tower's weights that the copies have
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
            if self._handle.state() != "fused":  # which `concatenated` raises
                break
            if found is None:  # the handle has counted this call
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
        """False where there are no weights to copy: the tower has never run fused, and cannot, or has just changed."""
        if self._synced < 0:
            if self._handle.state() == "fused" and self._handle.reason() is not None:
                return False
            self._handle.refresh()
        weights = self._handle.weights
        version = weights.version
        if version != self._synced and weights.host_unchanged():  # else it must be judged first
            for copied in self._copies:
                copied.take(self._tower)
            self._synced = version
        return version == self._synced

    def _shares_of(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> list[Share] | None:
        """What each device takes, the tower's own first; None for pixels that the tower must judge."""
        if not isinstance(pixel_values, torch.Tensor) or pixel_values.ndim != 2:
            return None
        return shares_of(self._handle.spec, len(pixel_values), grid, 1 + len(self._copies))

    def _run(self, pixel_values: torch.Tensor, shares: list[Share]) -> torch.Tensor | None:
        """The gathered rows, or None where this call must take the tower's original code."""
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
            rows = [other.result() for other in others]  # before anything is raised: nothing runs on afterwards
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
        """Takes over what `tower` is: in place, where it has the same modules, and tensors of the same shapes."""
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
        """The rows of a share whose pixels are on this device, in the caller's stream there."""
        with torch.inference_mode(), torch.cuda.stream(stream):  # of None: nothing
            found = self._handle(self._tower, pixels, grid, {})  # as the tower's own share: past hooks on the tower
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
    except (RuntimeError, AssertionError, TypeError) as error:  # torch's own, for what it has not
        raise ValueError(f"fusedvit: devices: no device {name!r} here: {first_line(error)}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"fusedvit: devices must be CPUs and NVIDIA GPUs, got {str(name)!r}")
    return found


def _tensors_of(tower: nn.Module) -> list[torch.Tensor]:
    return [*tower.parameters(), *tower.buffers()]


def _structure_of(tower: nn.Module) -> list[object]:
    """Modules, parameters and buffers in their order, without what they hold; which of them are the same objects."""
    numbers: dict[int, int] = {}
    found: list[object] = []
    for path, module in tower.named_modules(remove_duplicate=False):
        found.append((path, own_class(type(module)), numbers.setdefault(id(module), len(numbers))))
        for registry in (module._parameters, module._buffers):
            tensors = {name: t for name, t in registry.items() if t is not None}
            found.append([(n, t.shape, t.dtype, numbers.setdefault(id(t), len(numbers))) for n, t in tensors.items()])
    return found


def _take_attributes(mine: dict[str, Any], theirs: dict[str, Any], memo: dict[int, object]) -> None:
    """Makes a module's attributes those of the module that it is a copy of: numbers, flags, hooks, an adapter's scale.

    Args:
        theirs: of the other, as it gives them to copies: without what was compiled for itself.
        memo: what stands for modules and tensors of the original, as `copy.deepcopy` takes it.
    """
    others = {*REGISTRIES, HANDLE}  # of modules and tensors, and a tower's own handle
    for name in mine.keys() - theirs.keys() - others:
        del mine[name]
    for name in theirs.keys() - others:
        value = theirs[name]
        if name not in mine or content_of(mine[name]) != content_of(value):
            mine[name] = copy.deepcopy(value, memo)


def _stream_on(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
