"""One call over several GPUs: each has a copy of the tower, and encodes a share of the images and video frames."""

import queue  # not names of it, which gevent would replace in vain once this is imported
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedvit.api import call_original, fuse
from fusedvit.checks.find_tower import find_tower
from fusedvit.checks.forward_hooks import marks_for_gradients
from fusedvit.config import FuseConfig, takes_config
from fusedvit.errors import Reason, first_line, shown
from fusedvit.forks import is_held, renew_in_children
from fusedvit.fused_encoder import FusedEncoder, rows_of_record
from fusedvit.model.items import Item
from fusedvit.model.spec import VisionSpec
from fusedvit.outputs.gradients import with_gradients
from fusedvit.outputs.hugging_face import side_by_side
from fusedvit.runtime.inputs import Grid, check_grid, iterated
from fusedvit.runtime.item_shares import Share, in_order, shares_of
from fusedvit.runtime.runner import on_device
from fusedvit.tower_copies import Outcome, TowerCopy, stream_on

_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]  # where the result goes, a function and its arguments
MOST_RUNS = 3  # runs of a call during which the tower changes, before it runs on the tower's own GPU alone


class DataParallelEncoder:
    """A model's vision tower on several GPUs: `DataParallelEncoder(model, ["cuda:0", "cuda:1"])(pixel_values, grid)`.

    The model's tower is fused in place and encodes a share itself. Each other device holds a copy of the tower (in
    bf16, Qwen3-VL-8B's takes 1.1 GiB, and its prepared weights as much again). Copies follow the tower's weights and
    whatever else it computes with, such as the choice of adapters: a call that finds a change updates the copies and
    runs again. A call that cannot run fused runs the original code on the tower's own device alone. Items are balanced
    by load, and videos are cut between frames, which changes no bit of the outputs. The tower's handle counts the
    calls, and reports what the copies ran and hold.

    Args:
        model: as for `fuse`.
        devices: at least one. On the tower's own device the tower itself runs, not a copy.
        config: as for `fuse`.

    Raises:
        UnsupportedModel: as `fuse`.
        TypeError: as `fuse`, or `devices` is not a list of devices.
        ValueError: no devices are given, or one does not exist here, or is neither a CPU nor a GPU.
    """

    @takes_config
    def __init__(
        self, model: nn.Module, devices: Sequence[str | torch.device], config: FuseConfig | None = None
    ) -> None:
        others = _devices_of(devices)
        self._handle = fuse(model, config)
        self._tower = find_tower(model)
        own = self._handle.weights.first_parameter().device
        if own in others:
            others.remove(own)
        self._copies = tuple(TowerCopy(self._tower, self._handle, device) for device in others)
        self._synced = -1  # the version of the tower's weights that the copies hold
        self._lock = threading.RLock()  # held while copies are written, and while work on them is started
        self._under_way: set[Future[Any]] = set()  # work on the copies that may still run
        self._threads = _Threads(len(self._copies))
        renew_in_children(self)

    @property
    def handle(self) -> FusedEncoder:
        """The tower's handle, which `fuse` returns: counters, report and options of the whole."""
        return self._handle

    def __repr__(self) -> str:
        devices = ", ".join(str(copied.device) for copied in self._copies) or "none"
        return f"<DataParallelEncoder: {self._handle!r}; copies on {devices}>"

    def __call__(self, pixel_values: torch.Tensor, grid_thw: Grid) -> torch.Tensor:
        """The tower's rows, as `FusedEncoder.concatenated` gives them, on the tower's device.

        Any number of threads may call. The tower's handle counts each call once, as fused if all of its shares were.

        Args:
            pixel_values, grid_thw: as the tower takes them.

        Returns:
            `[tokens, (1 + n) * out]` in the caller's order.

        Raises:
            TypeError, ValueError, RuntimeError: as a call of the tower.
        """
        if self._handle.state() != "fused":
            return self._handle.concatenated(pixel_values, grid_thw)  # it raises the error
        try:
            grid = check_grid(grid_thw).cpu()
            found = self._over_devices(pixel_values, grid)
        except BaseException:
            self._handle.count(None)
            raise
        if found is None:
            return rows_of_record(self._tower(pixel_values, grid, return_dict=True))
        self._handle.count(found.ended)
        if found.rows is None:
            return rows_of_record(call_original(self._tower, pixel_values, grid, return_dict=True))
        return with_gradients([found.rows])[0] if marks_for_gradients(self._tower) else found.rows

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("fusedvit: a DataParallelEncoder cannot be copied or pickled: copy its model, and make another")

    def warmup(self, *, calls: Iterable[Grid] | None = None) -> None:
        """As `FusedEncoder.warmup`, on the tower's device, then on all others at once.

        Args:
            calls: the `grid_thw` of calls to come, if they are known: each device captures graphs for its shares only.

        Raises:
            RuntimeError, TypeError, ValueError: as `FusedEncoder.warmup`.
        """
        copies = self._copies
        if calls is None:
            grids: list[Any] = [None] * (1 + len(copies))
        else:
            checked = [check_grid(grid).cpu() for grid in iterated(calls)]
            grids = _by_device(checked, self._handle.spec, 1 + len(copies))
        self._handle.warmup(calls=grids[0])  # first: it raises if the tower cannot run fused
        begun = self._begin(copies, [(copied.warm_up, each) for copied, each in zip(copies, grids[1:], strict=True)])
        if begun is not None:
            wait(begun.others)
            for other in begun.others:
                other.result()

    def close(self) -> None:
        """Frees the copies once nothing runs on them. The model stays fused, and further calls run on its device."""
        with self._lock:
            wait(tuple(self._under_way))
            for copied in self._copies:
                copied.wait()
            self._copies = ()
            self._threads = _Threads(0)

    def _renew_locks(self) -> None:
        """See `forks`. A child has none of the threads. Copies that were being written are written again."""
        if is_held(self._lock):
            self._lock, self._synced = threading.RLock(), -1
        self._threads, self._under_way = _Threads(len(self._copies)), set()

    def _over_devices(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> Outcome | None:
        """Runs a call until all of its shares ran on the same weights; returns None if the tower must run it alone."""
        for _ in range(MOST_RUNS):
            copies = self._copies
            shares = self._shares_of(pixel_values, grid, 1 + len(copies))
            begun = None if shares is None else self._begin(copies, _given(copies, shares[1:], pixel_values))
            if shares is None or begun is None:
                return None
            try:
                pixels = shares[0].pixels_of(pixel_values)
                own = self._handle.answer_or_reason(self._tower, pixels, shares[0].grid, {})
            finally:
                wait(begun.others)  # also if the tower raises: no copy still runs after the call
            if isinstance(own, Reason):
                return Outcome(None, own)
            others = [other.result() for other in begun.others]
            if self._handle.weights.version == begun.version:
                return self._gathered(grid, shares, [Outcome(side_by_side(own.outputs, self._handle.spec)), *others])
        return None

    def _gathered(self, grid: torch.Tensor, shares: list[Share], parts: list[Outcome]) -> Outcome:
        """Joins the rows of all shares. The call counts as fused if all shares were."""
        ran = [shares[0], *(share for share in shares[1:] if share.pieces)]
        rows = in_order(ran, [part.rows for part in parts if part.rows is not None])
        reason = next((part.ended for part in parts if isinstance(part.ended, Reason)), None)
        return Outcome(rows, reason or list(map(Item._make, grid.tolist())))

    def _begin(self, copies: tuple[TowerCopy, ...], works: list[tuple[Any, ...]]) -> "_Begun | None":
        """Starts work on the copies once they are up to date; returns None if they cannot be.

        Copies are written only while nothing runs on them. Calls that find them up to date do not wait for each other.

        Args:
            works: a function and its arguments for each.
        """
        with self._lock:
            if copies is not self._copies or not self._bring_copies_up_to_date():  # or closed meanwhile
                return None
            others = [self._threads.start(*work) for work in works]
            self._under_way.update(others)
            for other in others:
                other.add_done_callback(self._under_way.discard)  # it holds its rows
            return _Begun(self._synced, others)

    def _bring_copies_up_to_date(self) -> bool:
        """Returns False if there are no weights to copy: the tower cannot run fused and never has, or just changed."""
        weights, prepared = self._handle.weights, self._handle.prepared
        if self._synced < 0 and not weights.host_unchanged():
            with on_device(weights.first_parameter().device):
                if self._handle.reason() is not None or prepared.prepare(weights.version) is not None:
                    return False
        version = weights.version
        if version != self._synced and weights.host_unchanged():  # a changed tower must be judged first
            wait(tuple(self._under_way))
            for copied in self._copies:
                copied.update_from(self._tower)
            self._synced = version
        return version == self._synced

    def _shares_of(self, pixel_values: torch.Tensor, grid: torch.Tensor, parts: int) -> list[Share] | None:
        """The share of each device, the tower's own first; None for inputs whose error the tower should raise."""
        if not isinstance(pixel_values, torch.Tensor) or pixel_values.ndim != 2:
            return None
        return shares_of(self._handle.spec, len(pixel_values), grid, parts)


class _Begun(NamedTuple):
    """Work that was started on the copies, and the version of the tower's weights that they hold."""

    version: int
    others: list[Future[Any]]


class _Threads:
    """Threads for work on the copies, which end when this object is freed.

    Python's own executor takes no more work once the main thread has ended, though other threads go on, and leaves work
    in its queue that it could start no thread for.
    """

    def __init__(self, most: int) -> None:
        self._left = most  # threads that may still be started
        self._started = 0
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()

    def start(self, act: Callable[..., Any], *given: Any) -> Future[Any]:
        """Starts `act(*given)` in a thread, or runs it here if the system has no room for any; one thread at a time may
        call this."""
        found: Future[Any] = Future()
        self._works.put((found, act, given))
        if self._left:
            self._left, self._started = self._left - 1, self._started + 1  # first, as an interrupt may follow the start
            try:
                threading.Thread(target=_work_off, args=(self._works,), name="fusedvit-device", daemon=True).start()
            except RuntimeError:
                self._left, self._started = self._left + 1, self._started - 1
        if not self._started:  # no thread could be started, or a signal's handler has closed the encoder meanwhile
            self._works.put(None)
            _work_off(self._works)
        return found

    def __del__(self) -> None:
        for _ in range(self._started):
            self._works.put(None)


def _work_off(works: "queue.SimpleQueue[_Work | None]") -> None:
    """Does `works` until a None among them."""
    while (work := works.get()) is not None:
        found, act, given = work
        try:
            found.set_result(act(*given))
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            found.set_exception(error)
        del work, found, act, given  # they hold a copy and its rows, and an error's traceback holds this frame


def _given(copies: tuple[TowerCopy, ...], shares: list[Share], pixel_values: torch.Tensor) -> list[tuple[Any, ...]]:
    """The work of `_begin` for shares of a call; pixels are moved to the copies' devices."""
    return [
        (copied.run, pixels.to(copied.device, non_blocking=True), share.grid, stream_on(copied.device))
        for copied, share in zip(copies, shares, strict=True)
        if share.pieces
        for pixels in [share.pixels_of(pixel_values)]
    ]


def _by_device(calls: list[torch.Tensor], spec: VisionSpec, parts: int) -> list[list[torch.Tensor]]:
    """For each device, the grids of its shares of `calls`."""
    found: list[list[torch.Tensor]] = [[] for _ in range(parts)]
    for grid in calls:
        shares = shares_of(spec, sum(t * h * w for t, h, w in grid.tolist()), grid, parts)
        for grids, share in zip(found, shares or (), strict=False):
            grids.append(share.grid)
        if shares is None:  # the tower runs it alone
            found[0].append(grid)
    return found


def _devices_of(given: Sequence[str | torch.device]) -> list[torch.device]:
    expected = "devices must name at least one device, as ['cuda:0', 'cuda:1'] does"
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"fusedvit: {expected}, got {shown(given)}")
    if not given:
        raise ValueError(f"fusedvit: {expected}, got {shown(given)}")
    return [_device_of(name) for name in given]


def _device_of(name: str | torch.device) -> torch.device:
    if not isinstance(name, str | torch.device):
        raise TypeError(f"fusedvit: devices must hold names of devices, as 'cuda:0', got {shown(name)}")
    try:
        found = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch raises these for devices that it does not have
        raise ValueError(f"fusedvit: devices: no device {shown(name)} here: {first_line(error)}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"fusedvit: devices must be CPUs and NVIDIA GPUs, got {str(name)!r}")
    return found
