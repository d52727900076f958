"""The handle of a fused tower: it keeps prepared weights true to the parameters, and runs the encoder."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fusedvit import reasons
from fusedvit.buffers import Capacity, allocate
from fusedvit.config import FuseConfig
from fusedvit.encoder import EncoderOutputs, encode
from fusedvit.families.record import Family
from fusedvit.items import Grid, Item, check_grid, check_items, check_pixels
from fusedvit.kernels.configs import Target
from fusedvit.kernels.fingerprint import Watched
from fusedvit.ops import Ops, ops_for
from fusedvit.plan import plan_for
from fusedvit.spec import VisionSpec
from fusedvit.stats import Stats
from fusedvit.watch import Snapshot, reason_of_tower
from fusedvit.weights import ALIGNMENT, EncoderWeights, prepare

MIB = 2**20


class FusedEncoder:
    """One fused tower: what `fusedvit.fuse` returns.

    Copies and pickles keep the configuration and make their own weights and counters.
    """

    def __init__(self, tower: nn.Module, family: Family, spec: VisionSpec, config: FuseConfig) -> None:
        self.tower = tower
        self.family = family
        self.spec = spec
        self.config = config
        self._start()

    def _start(self) -> None:
        self._stats = Stats()
        self._lock = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        self._snapshot: Snapshot | None = None
        self._weights: EncoderWeights | None = None
        self._watched: Watched | None = None
        self._reference: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tower", "family", "spec", "config")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # what a user reads

    def stats(self) -> dict[str, Any]:
        """Counters as plain values: calls, fused, original (by reason), items, tokens, refreshes, and MiB held."""
        return self._stats.as_dict() | {"weights_mib": self._held_bytes() / MIB}

    def report(self) -> str:
        """What is fused, on which operations, what memory it holds, and why anything is not."""
        spec, parameter = self.spec, next(self.tower.parameters())
        reason = reason_of_tower(self.tower)
        state = f"fused on the {ops_for(parameter.device).name} table" if reason is None else f"original code: {reason}"
        lines = [
            f"{type(self.tower).__name__} ({self.family.name}): {state}",
            f"  {spec.depth} blocks of {spec.hidden_size} channels, {spec.num_heads} heads of {spec.head_dim}, "
            f"MLP {spec.intermediate_size} {spec.activation}, output {spec.out_size}, deepstack {list(spec.deepstack)}",
            f"  {parameter.dtype} on {parameter.device}, prepared weights {self._held_bytes() / MIB:.1f} MiB",
        ]
        s = self._stats
        lines.append(f"  {s.calls} calls, {s.fused} fused, {s.items} items, {s.tokens} tokens, {s.refreshes} refreshes")
        lines += [f"  original code, {count} calls: {why} ({reasons.ADVICE[why]})" for why, count in s.original.items()]
        return "\n".join(lines)

    def refresh(self) -> None:
        """Makes the prepared weights again from the tower's parameters, at once.

        Raises:
            RuntimeError: the tower as it stands cannot run fused; the message says why.
        """
        with self._lock:
            reason = reason_of_tower(self.tower)
            if reason is not None:
                raise RuntimeError(f"the tower cannot run fused: {reason} ({reasons.ADVICE[reason]})")
            self._prepare()

    def _held_bytes(self) -> int:
        return 0 if self._weights is None else self._weights.held_bytes()

    # a call

    def reason(self, pixel_values: object, grid_thw: object, extra: dict[str, Any]) -> str | None:
        """Why this call must take the original code, or None. Counts, warns, or raises if strict.

        Raises:
            RuntimeError: `strict` and there is a reason.
        """
        with self._lock:
            self._stats.calls += 1
            found = reasons.reason_of_call(self.tower, pixel_values, grid_thw, extra) or self._reason_of_state()
            if found is None:
                return None
            if self.config.strict:
                raise RuntimeError(f"strict: this call would run the original code: {found} ({reasons.ADVICE[found]})")
            self._stats.count_original(found, type(self.tower).__name__)
            return found

    def _reason_of_state(self) -> str | None:
        """Looks at the whole tower only when it no longer is what it was."""
        if self._snapshot is not None and self._snapshot.same_structure() and self._snapshot.same_parameters():
            return None
        found = reason_of_tower(self.tower)
        if found is not None:
            self._snapshot = None  # whatever comes back later is prepared anew
        return found

    def run(self, pixel_values: torch.Tensor, grid_thw: Grid) -> EncoderOutputs:
        """Runs fused.

        Args:
            pixel_values: `[patches, patch_width]` of any float dtype, on any device.
            grid_thw: `[items, 3]` integers (t, h, w) in patches: a tensor on any device, or a list.

        Raises:
            TypeError, ValueError: see `fusedvit.items`; nothing of the encoder has been launched then.
        """
        check_pixels(pixel_values, self.spec)
        grid = check_grid(grid_thw)
        parameter = next(self.tower.parameters())
        with _on(parameter.device):
            items = self._read(grid, pixel_values.shape[0], parameter.device)
            pixels = _aligned(pixel_values.detach().to(parameter.device, parameter.dtype))
            outputs = self._encode(pixels, grid, items)
        with self._lock:
            self._stats.fused += 1
            self._stats.items += len(items)
            self._stats.tokens += sum(item.tokens for item in items)
        return outputs

    def _read(self, grid: torch.Tensor, patches: int, device: torch.device) -> list[Item]:
        """The items, and weights made true: the call's one host read, of whatever lies on the GPU."""
        items = None
        if grid.device.type == "cpu":
            items = check_items(grid.tolist(), patches, self.spec.merge_size)
        with self._lock:
            if self._snapshot is None or not self._snapshot.same_parameters():
                self._prepare()
            flag = self._fingerprint_changed(device)
            if items is None:
                table = grid if flag is None else torch.cat([flag.to(grid.dtype), grid.flatten()])
                rows = table.flatten().tolist()
                changed = flag is not None and bool(rows.pop(0))
                triples = [rows[i : i + 3] for i in range(0, len(rows), 3)]
                items = check_items(triples, patches, self.spec.merge_size)
            else:
                changed = flag is not None and bool(flag.item())
            if changed:
                self._prepare()
        return items

    def _fingerprint_changed(self, device: torch.device) -> torch.Tensor | None:
        """`[1]` on the device: some parameter's content is not what was prepared. None where it is not watched."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not self.config.watch_data or capturing or self._watched is None or self._reference is None:
            return None
        now = ops_for(device).fingerprint(self._watched, torch.empty_like(self._reference))
        return (now != self._reference).any().view(1)

    def _prepare(self) -> None:
        """Prepared weights, snapshot and fingerprint, made from the parameters as they are."""
        parameters = dict(self.tower.named_parameters())
        with torch.inference_mode(False), torch.no_grad():
            source = self.family.source(parameters)
            self._weights = prepare(self.spec, self.family.names, source, reuse=self._weights)
            self._snapshot = Snapshot.of(self.tower)
            self._watched = Watched.of(list(parameters.values()))
            device = self._watched.pointers.device
            empty = torch.empty(len(parameters), dtype=torch.int32, device=device)
            self._reference = ops_for(device).fingerprint(self._watched, empty)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # whichever stream uses them next finds them written
        self._stats.refreshes += 1

    def _encode(self, pixels: torch.Tensor, grid: torch.Tensor, items: list[Item]) -> EncoderOutputs:
        tokens = sum(item.tokens for item in items)
        assert self._weights is not None, "weights are prepared before a run"
        if tokens == 0:
            return _empty_outputs(self.spec, pixels)
        ops: Ops = ops_for(pixels.device)
        plan = plan_for(self.spec, tokens, pixels.dtype, Target.of(pixels.device))
        capacity = Capacity.of(items, plan.attention.block_m)
        buffers = allocate(self.spec, capacity, pixels.dtype, pixels.device, pixels)
        buffers.grid.copy_(grid, non_blocking=True)
        with torch.no_grad():
            return encode(self.spec, self._weights, buffers, ops, plan)


def _aligned(pixels: torch.Tensor) -> torch.Tensor:
    """`pixels` with rows that the copy engine takes: base and pitch a multiple of 16 bytes."""
    size = pixels.element_size()
    if pixels.stride(1) == 1 and pixels.stride(0) * size % ALIGNMENT == 0 and pixels.data_ptr() % ALIGNMENT == 0:
        return pixels
    step = max(1, ALIGNMENT // size)
    padded = pixels.new_empty(pixels.shape[0], -(-pixels.shape[1] // step) * step)[:, : pixels.shape[1]]
    return padded.copy_(pixels)


def _empty_outputs(spec: VisionSpec, pixels: torch.Tensor) -> EncoderOutputs:
    merged = pixels.new_empty(1 + len(spec.deepstack), 0, spec.out_size)
    return EncoderOutputs(pixels.new_empty(0, spec.hidden_size), merged)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Makes `device` current, if it is a GPU."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield
