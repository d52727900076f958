"""Prepared weights, kept in step with a tower's parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_not
from typing import NamedTuple, Protocol

import torch
from torch.nn import Parameter

from fusedvit.errors import BEYOND_FP16, Reason, WeightsReleased, attempted
from fusedvit.kernels.load_inputs import FLOATS
from fusedvit.model.fp16_range import BeyondFp16
from fusedvit.model.ops import Ops, ops_for
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.readback import ContentCheck, ReadBack, StreamMark

# What weights are prepared from, to be compared by `==`, and each parameter's `_version`, None if it has none.
Ingredients = tuple[object, list[int | None]]
_address_of = torch.UntypedStorage.data_ptr


class Snapshot(Protocol):
    """A tower's modules and parameters at one moment."""

    def first_parameter(self) -> torch.Tensor | None:
        """The tensor that is now registered where the first parameter was, or None."""

    def in_place(self) -> bool:
        """Whether every parameter is at the address where it was."""

    def unchanged(self) -> bool:
        """Whether the tower still has these modules and parameters; neither content nor addresses are compared."""

    def trained(self) -> bool:
        """Whether a parameter requires a gradient."""

    def renewed(self) -> "Snapshot":
        """The same snapshot with the addresses and versions that parameters have now."""

    def versions(self) -> list[int]:
        """Versions of the parameters."""


class Source(Protocol):
    """The tower that weights are prepared from, as `fusedvit.checks` sees it."""

    def reason(self) -> Reason | None:
        """Why the tower as it stands cannot run fused, or None."""

    def is_judged_by_state(self) -> bool:
        """Whether a change of whatever decided the last `reason` would show in a snapshot."""

    def each_parameter(self) -> Iterator[torch.Tensor]:
        """Every parameter once."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every parameter by name; a shared parameter appears under each of its names."""

    def read(self) -> Sequence[torch.Tensor]:
        """The tensors that the tower as it stands computes with: parameters, then buffers on their device."""

    def prepare(self, parameters: Mapping[str, torch.Tensor], reuse: EncoderWeights | None) -> EncoderWeights:
        """Weights from `parameters`, in the memory of `reuse` if they fit.

        Raises:
            BeyondFp16: fp16 cannot hold a prepared value.
        """

    def snapshot(self) -> Snapshot:
        """The tower as it stands."""

    def ingredients(self) -> Ingredients | None:
        """What weights are prepared from, apart from the content of parameters; None if that cannot be told."""


class _CurrentWeights(NamedTuple):
    """Prepared weights and their checks, in one record because an interrupt may arrive between two assignments.

    Addresses are those when the record was created; memory may move later.

    Attributes:
        content: a check of the parameters that `weights` were prepared from, and of the prepared copies.
        pointers: addresses of all tensors of `weights`.
        borrowed: addresses of the tensors that are not copies but lie in the memory of the tower's parameters.
        storages: storages of these tensors; reading their address takes a quarter less time than reading a tensor's.
        addresses: addresses of `storages`.
        kinds: see `WeightCache.kinds`.
    """

    weights: EncoderWeights
    content: ContentCheck
    pointers: tuple[int, ...]
    borrowed: list[int]
    storages: tuple[torch.UntypedStorage, ...]
    addresses: list[int]
    kinds: tuple[int, ...]

    @staticmethod
    def of(weights: EncoderWeights, content: ContentCheck) -> "_CurrentWeights":
        borrowed = weights.borrowed()
        storages = tuple(t.untyped_storage() for t in borrowed)
        at, addresses = [t.data_ptr() for t in borrowed], list(map(_address_of, storages))
        kinds = tuple(kind for kind, patch in enumerate(weights.patches()) if patch is not None)
        return _CurrentWeights(weights, content, weights.pointers(), at, storages, addresses, kinds)


def _is_repeat(before: ContentCheck, now: ContentCheck) -> bool:
    """Whether new parameter objects hold what the old ones held, as far as fingerprints tell."""
    count = len(now.parameters)
    if len(before.parameters) != count:
        return False
    others = map(is_not, before.parameters, now.parameters)
    if not any(other and isinstance(p, Parameter) for other, p in zip(others, now.parameters, strict=True)):
        return False  # new buffers alone do not count: moving a tower replaces them
    return torch.equal(before.expected[:count], now.expected)


def _lent_from(current: _CurrentWeights, parameters: Sequence[torch.Tensor]) -> EncoderWeights | None:
    """The weights with borrowed tensors taken from `parameters`, ordered as `current.content.parameters` are.

    None if parameters moved while the weights were prepared.
    """
    by_address = dict(zip(current.content.addresses, parameters, strict=True))
    return current.weights.lent(current.borrowed, by_address) if by_address.keys() >= {*current.borrowed} else None


class _Refusal(NamedTuple):
    """Why the tower could not run fused, and its state then. It is kept because judging takes as long as a small call.

    Attributes:
        snapshot: the tower when it was refused.
        holds: returns whether parameters still hold what they held; None if their content did not decide.
    """

    reason: Reason
    snapshot: Snapshot
    holds: Callable[[], bool] | None


class WeightCache:
    """Weights that are prepared when first needed, and again when the tower has changed.

    Attributes:
        version: increases with every change of the weights; a run that began with an older version is not accepted.
        preparations: how often weights were prepared.
        changes: how often weights were prepared because the tower had changed, not after `release` or `outdate`.
        moves: how often parameters have moved with unchanged content since weights were last released.
        repeats: preparations in a row from new parameter objects that held the same content as the old ones.
        requests: how often `release` and `outdate` were called.
    """

    def __init__(
        self,
        source: Callable[[], Source],
        on_move: Callable[[], None],
        on_loss: Callable[[], None],
        ops: Callable[[torch.device], Ops] = ops_for,
        on_prepare: Callable[[torch.device], None] = lambda device: None,
    ) -> None:
        """Nothing prepared yet.

        Args:
            source: returns the tower; called each time it is needed, so that the tower is not kept alive.
            on_move: called when tensors that a captured graph points to are no longer the ones in use.
            on_loss: called when GPU memory was discarded, as by an engine's sleep mode; static buffers may be lost too.
            ops: returns the operations that take fingerprints outside a call.
            on_prepare: called before weights are prepared on a device.
        """
        self.version = self.preparations = self.changes = self.moves = self.repeats = self.requests = 0
        self._asked = False  # the next preparation was asked for (release, refresh, …) and does not count in `changes`
        self._source = source
        self._on_move = on_move
        self._on_loss = on_loss
        self._ops = ops
        self._on_prepare = on_prepare
        self._forget()

    def _forget(self) -> None:
        self._snapshot: Snapshot | None = None
        self._current: _CurrentWeights | None = None
        self._ingredients: Ingredients | None = None
        self._digest: list[int] | None = None  # hash of the whole content of the parameters, once it was needed
        self._lost = False
        self._refusal: _Refusal | None = None
        self._refusals = 0  # judgements since weights were last replaced

    def release(self) -> None:
        """Frees the weights; the next use prepares them again."""
        self.version += 1  # so that a run in progress is not accepted
        self.moves = 0
        self.requests += 1
        self._asked = True
        self._forget()

    def outdate(self) -> None:
        """Makes the next use prepare weights again, in the same memory, whatever fingerprints say."""
        self.version += 1  # so that a run in progress is not accepted
        self._snapshot = self._ingredients = self._refusal = None
        self.requests += 1
        self._asked = True

    def expect_change(self) -> None:
        """The next preparation does not count in `changes`: the tower is about to be updated from another one."""
        self._asked = True

    def get(self) -> EncoderWeights:
        """The prepared weights; `prepare` must have been called.

        Raises:
            WeightsReleased: the weights were released since.
        """
        current = self._current
        if current is None:
            raise WeightsReleased
        return current.weights

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of pixels that the weights take, out of `kernels.load_inputs.KINDS`."""
        current = self._current
        return () if current is None else current.kinds

    def held_bytes(self) -> int:
        """Bytes of prepared copies."""
        current = self._current
        return 0 if current is None else current.weights.held_bytes()

    def first_parameter(self) -> torch.Tensor:
        """A parameter of the tower, for its device and dtype. Once weights are prepared, it is found without a walk.

        After a change of the tower it may be an old parameter, which `read_back` notices. For a tower without
        parameters, as sharding that joins them leaves it, it is an empty tensor, and `prepare` says what is missing.
        """
        snapshot = self._snapshot
        found = None if snapshot is None else snapshot.first_parameter()
        if found is None:
            found = next(self._source().each_parameter(), None)
        return torch.empty(0, device="cpu") if found is None else found

    def trained(self) -> bool:
        """Whether a parameter of the tower that the weights were prepared from requires a gradient."""
        snapshot = self._snapshot  # read once, as another thread may drop it meanwhile
        return snapshot is not None and snapshot.trained()

    def fits(self, parameter: torch.Tensor, kind: int = FLOATS) -> bool:
        """Whether weights are prepared, on the device and in the dtype of `parameter`, and have not moved.

        Args:
            kind: the kind of pixels that the weights must take, one of `kernels.load_inputs.KINDS`.
        """
        current = self._current
        if self._snapshot is None or current is None or not self.in_place() or kind not in current.kinds:
            return False
        weight = current.weights.patch.weight
        return weight.device == parameter.device and weight.dtype == parameter.dtype

    def in_place(self) -> bool:
        """Whether borrowed tensors are at their old addresses. Checked before a captured graph reads through these
        addresses, as other code may move or free the memory of parameters."""
        current = self._current
        return current is None or list(map(_address_of, current.storages)) == current.addresses

    def mark(self) -> StreamMark | None:
        """A mark of the current point in the current stream of the weights' GPU, for `read_back`; None on a CPU."""
        current = self._current
        return None if current is None or current.content.marks is None else current.content.marks.here()

    def read_back(self, mark: StreamMark | None, check_content: bool, grid: torch.Tensor | None) -> ReadBack:
        """Whether the weights are still those of the tower, and the rows of `grid`, with at most one host read.

        The read runs on its own stream, overlapped with whatever was launched since `mark`. Meanwhile the host compares
        modules and parameters. Addresses of parameters are compared first, as the read goes through them.

        Args:
            mark: the point in the caller's stream that the read waits for; None on a CPU, or if nothing is read.
            check_content: compare fingerprints of the parameters' content.
            grid: `[n, 3]` on the weights' device; None if there is no grid to read.

        Raises:
            WeightsReleased: the weights were released since.
        """
        current, snapshot = self._current, self._snapshot
        if current is None:
            raise WeightsReleased
        in_place = snapshot is not None and snapshot.in_place()
        check_content = check_content and in_place
        if not check_content and grid is None:
            return ReadBack(in_place and self.host_unchanged(), [])
        found = current.content.begin(mark, check_content, grid).wait(self.host_unchanged)
        if found.lost:
            self._lost = True
        return found if in_place else found._replace(unchanged=False)

    def unchanged_since_now(self) -> Callable[[], bool]:
        """A function to call later: whether the tower is still what these weights were prepared from.

        It works after the weights were prepared again or released, and waits for the GPU. If another thread has already
        released the weights, it compares with the tower as it stands now.
        """
        snapshot, current = self._snapshot, self._current
        if snapshot is not None and current is not None:
            content = current.content
        else:
            source = self._source()
            with torch.inference_mode(False), torch.no_grad():
                snapshot, content = source.snapshot(), self._read(source)
        holds = content.parameters_hold()
        return lambda: snapshot.unchanged() and holds()

    def host_unchanged(self) -> bool:
        """Whether the tower still has its modules, code and parameters; the parameters' content is not compared."""
        snapshot = self._snapshot
        return snapshot is not None and snapshot.unchanged()

    def follow(self, kinds: Sequence[int]) -> bool:
        """Adopts the tower as it is now without preparing, or returns False if that is not possible; waits for the GPU.

        It is possible if the weights take pixels of all of `kinds`, and the tower's parameters only moved or were
        overwritten with the values that they held, or the same adapters are active again. Sharding and offloading free
        a parameter's memory after each use and allocate other memory for the next; weight synchronisation also writes
        the parameters of a frozen tower. Prepared copies stay; borrowed tensors are replaced, as they may have moved.
        """
        snapshot, current = self._snapshot, self._current
        if snapshot is None or current is None or self._lost or not {*kinds} <= {*self.kinds}:
            return False
        now = snapshot.renewed()  # taken first, so that a later move or write is noticed
        in_place, written = snapshot.in_place(), now.versions() != snapshot.versions()
        if (in_place and snapshot.unchanged()) or not now.unchanged() or (written and self._digest is None):
            return False
        content = current.content
        moved = content.moved(self._ops(content.sources.pointers.device))
        if moved is None or (written and moved.digest() != self._digest):
            return False
        lent = _lent_from(current, content.parameters)
        if lent is None:
            return False
        self.moves += not in_place
        self._replace_weights(lent, moved, now, self._ingredients)
        return True

    def prepare(self) -> Reason | None:
        """Prepares weights from the tower as it stands, or returns why it cannot run fused; waits for the GPU.

        Weights are prepared nowhere else, so the tower is always checked first. Weights that would come out the same
        are kept: a hook that came and went, or another attention implementation, changes none.
        """
        source = self._source()
        reason = source.reason()
        if reason is None:
            reason = self._prepare(source)
        elif source.is_judged_by_state():
            self._note(reason, source)
        if reason is not None:
            self._snapshot = None  # whatever changes next, the tower is judged again
            self._let_go(source)
        return reason

    def refusal(self) -> Reason | None:
        """Why the tower could not run fused when it was last judged, if it has not changed since; waits for the GPU
        only if weights were refused because of their content."""
        last = self._refusal
        if last is None or not last.snapshot.renewed().unchanged():
            return None
        if last.holds is None:
            return last.reason if last.snapshot.in_place() else None
        with torch.inference_mode(False), torch.no_grad():
            return last.reason if last.holds() else None

    def _note(self, reason: Reason, source: Source) -> None:
        """Keeps a refusal for `refusal`: only the first, second, fourth, eighth … in a row, as keeping one costs more
        than it saves if the tower changes at each call."""
        self._refusal = None
        self._refusals += 1
        if self._refusals & (self._refusals - 1):
            return
        with torch.inference_mode(False), torch.no_grad():
            snapshot = attempted(source.snapshot)
        if isinstance(snapshot, Exception):  # a refused tower may hold parameters of any kind
            return
        if source.reason() == reason:  # the tower has not changed meanwhile
            self._refusal = _Refusal(reason, snapshot, None)

    def _prepare(self, source: Source) -> Reason | None:
        if self._lost:
            self._on_loss()
            self._lost, self._ingredients = False, None
        parameters = source.parameters()
        device = next(iter(parameters.values())).device
        self._on_prepare(device)
        with torch.inference_mode(False), torch.no_grad():
            snapshot = source.snapshot()  # before the weights, like `content`: a write meanwhile will be noticed
            ingredients = source.ingredients()
            content = self._read(source)
            kept, digest = self._kept(content, ingredients)
            try:
                weights, content = kept or self._prepared_anew(source, content)
            except BeyondFp16 as why:
                reason = Reason(BEYOND_FP16, str(why))
                self._refusal = _Refusal(reason, snapshot, content.parameters_hold())
                return reason
            self._digest = digest if digest is not None and snapshot.unchanged() else None
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # so that any stream may use them next
        self.moves += kept is not None and weights.pointers() != self._pointers()
        self._replace_weights(weights, content, snapshot, ingredients)
        return None

    def _kept(
        self, now: ContentCheck, ingredients: Ingredients | None
    ) -> tuple[tuple[EncoderWeights, ContentCheck] | None, list[int] | None]:
        """The weights at hand with a check of `now` and their copies, if preparing would give the same: from the same
        parameters with the same fingerprints, at the same versions or with the same digest. Second, the digest of what
        `now` read, or None if none was taken."""
        current, before = self._current, self._ingredients
        if current is None or ingredients is None or before is None or ingredients[0] != before[0]:
            return None, None
        whole = now.with_copies(current.weights.copies(), self._ops(now.sources.pointers.device))
        lent = _lent_from(current, now.parameters) if current.content.agrees_with(whole) else None
        if lent is None:
            return None, None
        written = None in ingredients[1] or ingredients[1] != before[1]
        digest = now.digest() if written else self._digest  # at the first write there is no digest to compare with
        return (lent, whole) if digest == self._digest else None, digest

    def _prepared_anew(self, source: Source, content: ContentCheck) -> tuple[EncoderWeights, ContentCheck]:
        """Weights from what `content` read, in the memory of the old ones, and `content` extended by their copies."""
        current = self._current
        self.repeats = self.repeats + 1 if current is not None and _is_repeat(current.content, content) else 0
        self._snapshot = self._ingredients = None  # where this fails midway, copies match neither state of the tower
        weights = source.prepare(source.parameters(), None if current is None else current.weights)
        self.preparations += 1
        self.changes += not self._asked
        self._asked = False
        return weights, content.with_copies(weights.copies(), self._ops(content.sources.pointers.device))

    def _read(self, source: Source) -> ContentCheck:
        """Fingerprints of the parameters of `source`; waits for the GPU."""
        read = source.read()
        return ContentCheck.of(read, self._ops(read[0].device))

    def _let_go(self, source: Source) -> None:
        """Forgets weights that keep memory alive which the tower no longer uses."""
        current = self._current
        if current is not None and not current.content.held_by(source.each_parameter()):
            self.version += 1
            self._on_move()  # before the weights are forgotten: an interrupt must not leave graphs that read them
            self._forget()

    def _pointers(self) -> tuple[int, ...]:
        current = self._current
        return () if current is None else current.pointers

    def _replace_weights(
        self, weights: EncoderWeights, content: ContentCheck, snapshot: Snapshot, ingredients: Ingredients | None
    ) -> None:
        """Replaces the weights. The order matters, as other threads may be running and an interrupt may arrive at any
        point: until the snapshot is set, no run is accepted and the next call prepares weights. A run that read the old
        weights began with an older version."""
        current, before = _CurrentWeights.of(weights, content), self._pointers()
        self._snapshot = self._refusal = None
        self._refusals = 0
        if before and before != current.pointers:
            self._on_move()
        self._current = current
        self._ingredients = ingredients
        self.version += 1
        self._snapshot = snapshot
