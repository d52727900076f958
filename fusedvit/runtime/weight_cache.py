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

# What weights are prepared from, to be compared by `==`, and versions of the parameters, None for one that counts none.
Ingredients = tuple[object, list[int | None]]
_address_of = torch.UntypedStorage.data_ptr


class Snapshot(Protocol):
    """A tower's modules and parameters at one moment."""

    def first_parameter(self) -> torch.Tensor | None:
        """What is now where the first parameter was."""

    def in_place(self) -> bool:
        """Whether every parameter lies where it did."""

    def unchanged(self) -> bool:
        """Whether the tower has these modules and parameters still; neither content nor addresses are compared."""

    def trained(self) -> bool:
        """Whether a parameter wants a gradient."""

    def renewed(self) -> "Snapshot":
        """The same, with the addresses and versions that parameters have now, and what else stands for the same."""

    def versions(self) -> list[int]:
        """Versions of the parameters."""


class Source(Protocol):
    """The tower that weights are prepared from, as `fusedvit.checks` sees it."""

    def reason(self) -> Reason | None:
        """Why the tower as it stands cannot run fused, or None."""

    def is_judged_by_state(self) -> bool:
        """Whether a snapshot would show whatever decided the last `reason`."""

    def each_parameter(self) -> Iterator[torch.Tensor]:
        """Every parameter once."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every parameter by its name, shared ones under each of theirs."""

    def read(self) -> Sequence[torch.Tensor]:
        """What the tower as it stands computes with: parameters, then buffers on their device."""

    def prepare(self, parameters: Mapping[str, torch.Tensor], reuse: EncoderWeights | None) -> EncoderWeights:
        """Weights from `parameters`, in the memory of `reuse` where that fits.

        Raises:
            BeyondFp16: there is one that fp16 cannot hold.
        """

    def snapshot(self) -> Snapshot:
        """The tower as it stands."""

    def ingredients(self) -> Ingredients | None:
        """What weights are prepared from beside the content of parameters; None where that cannot be told."""


class _Borrowed(NamedTuple):
    """What the weights have in memory of the tower's parameters.

    Attributes:
        pointers: addresses of the tensors, when they were prepared.
        storages: their memory; asking it takes a quarter less time than asking the tensors.
        addresses: of `storages` then.
    """

    pointers: list[int]
    storages: tuple[torch.UntypedStorage, ...]
    addresses: list[int]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> "_Borrowed":
        storages = tuple(t.untyped_storage() for t in tensors)
        return _Borrowed([t.data_ptr() for t in tensors], storages, list(map(_address_of, storages)))


class _Taken(NamedTuple):
    """Prepared weights and what belongs to them: one record, as an interrupt may land between two assignments.

    Attributes:
        content: a check of the parameters that they were prepared from, and of their copies.
        borrowed: what they have in memory of these.
        pointers: their addresses when they were taken; a tensor's memory may have moved since.
        kinds: see `WeightCache`.
    """

    weights: EncoderWeights
    content: ContentCheck
    borrowed: _Borrowed
    pointers: tuple[int, ...]
    kinds: tuple[int, ...]

    @staticmethod
    def of(weights: EncoderWeights, content: ContentCheck) -> "_Taken":
        kinds = tuple(kind for kind, patch in enumerate(weights.patches()) if patch is not None)
        return _Taken(weights, content, _Borrowed.of(weights.borrowed()), weights.pointers(), kinds)


def _is_repeat(before: ContentCheck, now: ContentCheck) -> bool:
    """Whether other parameters hold what those of before did, as far as fingerprints tell."""
    count = len(now.parameters)
    if len(before.parameters) != count:
        return False
    others = map(is_not, before.parameters, now.parameters)
    if not any(other and isinstance(p, Parameter) for other, p in zip(others, now.parameters, strict=True)):
        return False  # buffers are other tensors wherever a tower was moved
    return torch.equal(before.expected[:count], now.expected)


def _lent_from(taken: _Taken, parameters: Sequence[torch.Tensor]) -> EncoderWeights | None:
    """The weights with what they borrow taken from `parameters`, in the order of those of their content; None where
    somebody moved these while they were prepared."""
    by_address = dict(zip(taken.content.addresses, parameters, strict=True))
    borrowed = taken.borrowed.pointers
    return taken.weights.lent(borrowed, by_address) if by_address.keys() >= {*borrowed} else None


class _Refusal(NamedTuple):
    """Why the tower could not run fused, and what it was then: judging it takes as long as a small call.

    Attributes:
        snapshot: the tower when it was refused.
        holds: asks whether parameters still hold what they did; None where their content did not decide.
    """

    reason: Reason
    snapshot: Snapshot
    holds: Callable[[], bool] | None


class WeightCache:
    """Weights prepared when first needed, and again when the tower has changed.

    Attributes:
        version: a run that began with an older version is not accepted.
        prepared: how often weights were prepared.
        changes: how often since the tower was another than before; not where somebody asked for it or gave them back.
        moves: how often parameters have moved with their content unchanged, since weights were last released.
        repeats: preparations in a row from other parameters that held what those before them did.
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
            source: the tower, which is asked for anew each time and not kept.
            on_move: called when tensors that a captured graph points to are no longer the ones in use.
            on_loss: called when GPU memory was discarded, as by an engine's sleep mode: static buffers may be, too.
            ops: what fingerprints are taken with outside a call.
            on_prepare: called before weights are prepared on a device.
        """
        self.version = self.prepared = self.changes = self.moves = self.repeats = 0
        self._asked = False
        self._source = source
        self._on_move = on_move
        self._on_loss = on_loss
        self._ops = ops
        self._on_prepare = on_prepare
        self._forget()

    def _forget(self) -> None:
        self._snapshot: Snapshot | None = None
        self._taken: _Taken | None = None
        self._ingredients: Ingredients | None = None
        self._digest: list[int] | None = None  # of all that the parameters held, where that was asked
        self._lost = False
        self._refusal: _Refusal | None = None
        self._refusals = 0  # judgements since weights were last taken

    def release(self) -> None:
        """Gives everything back; the next use prepares weights again."""
        self.version += 1  # a run under way is not accepted
        self.moves = 0
        self._asked = True
        self._forget()

    def outdate(self) -> None:
        """The next use prepares weights again, in the memory of these, whatever fingerprints say."""
        self.version += 1  # a run under way is not accepted
        self._snapshot = self._ingredients = self._refusal = None
        self._asked = True

    def get(self) -> EncoderWeights:
        """The prepared weights; `prepare` comes first.

        Raises:
            WeightsReleased: they were given back since.
        """
        taken = self._taken
        if taken is None:
            raise WeightsReleased
        return taken.weights

    @property
    def kinds(self) -> tuple[int, ...]:
        """Of pixels that the weights take, of `kernels.load_inputs.KINDS`."""
        taken = self._taken
        return () if taken is None else taken.kinds

    def held_bytes(self) -> int:
        """Bytes of prepared copies."""
        taken = self._taken
        return 0 if taken is None else taken.weights.held_bytes()

    def first_parameter(self) -> torch.Tensor:
        """A parameter, for its device and dtype: without a walk of the tower where weights are prepared.

        In a tower that has changed since it may be an old one; `read_back` notices that. Where a tower has none, as
        sharding leaves it that joins parameters, it is an empty tensor, and `prepare` says what is missing.
        """
        snapshot = self._snapshot
        found = None if snapshot is None else snapshot.first_parameter()
        if found is None:
            found = next(self._source().each_parameter(), None)
        return torch.empty(0, device="cpu") if found is None else found

    def trained(self) -> bool:
        """Whether a parameter of the tower that they were prepared from wants a gradient."""
        snapshot = self._snapshot  # once: another thread may give it back meanwhile
        return snapshot is not None and snapshot.trained()

    def fits(self, parameter: torch.Tensor, kind: int = FLOATS) -> bool:
        """Whether weights are prepared, on the device and in the dtype of `parameter`, and lie where they did.

        Args:
            kind: of the pixels that they are to take, one of `kernels.load_inputs.KINDS`.
        """
        taken = self._taken
        if self._snapshot is None or taken is None or not self.in_place() or kind not in taken.kinds:
            return False
        weight = taken.weights.patch.weight
        return weight.device == parameter.device and weight.dtype == parameter.dtype

    def in_place(self) -> bool:
        """Whether what the weights borrow lies where it did: asked before a captured graph reads through addresses of
        then, as others may move or free the memory of parameters."""
        taken = self._taken
        return taken is None or list(map(_address_of, taken.borrowed.storages)) == taken.borrowed.addresses

    def mark(self) -> StreamMark | None:
        """Where the current stream of the weights' GPU is, for `read_back`; None on a CPU."""
        taken = self._taken
        return None if taken is None or taken.content.marks is None else taken.content.marks.here()

    def read_back(self, mark: StreamMark | None, check_content: bool, grid: torch.Tensor | None) -> ReadBack:
        """Whether the weights are still those of the tower, and the rows of `grid`: one host read at most.

        The read runs on a stream of its own, overlapped with whatever was launched since `mark`; modules and parameters
        are compared on the host meanwhile. Addresses of parameters are compared before it, as it reads through them.

        Args:
            mark: the point in the caller's stream that the read waits for; None on a CPU, or where nothing is read.
            check_content: compare fingerprints of the parameters' content.
            grid: `[n, 3]` on the weights' device; None if there is none to read.

        Raises:
            WeightsReleased: they were given back since.
        """
        taken, snapshot = self._taken, self._snapshot
        if taken is None:
            raise WeightsReleased
        in_place = snapshot is not None and snapshot.in_place()
        check_content = check_content and in_place
        if not check_content and grid is None:
            return ReadBack(in_place and self.host_unchanged(), [])
        found = taken.content.begin(mark, check_content, grid).wait(self.host_unchanged)
        if found.lost:
            self._lost = True
        return found if in_place else found._replace(unchanged=False)

    def unchanged_since_now(self) -> Callable[[], bool]:
        """A question to ask later: whether the tower still is what these weights were prepared from.

        It can be asked when they have been prepared again or given back, and waits for the GPU then. Where another
        thread has given them back since the call that asks, it is of the tower as it stands.
        """
        snapshot, taken = self._snapshot, self._taken
        if snapshot is not None and taken is not None:
            content = taken.content
        else:
            source = self._source()
            with torch.inference_mode(False), torch.no_grad():
                snapshot, content = source.snapshot(), self._read(source)
        holds = content.parameters_hold()
        return lambda: snapshot.unchanged() and holds()

    def host_unchanged(self) -> bool:
        """Whether the tower has the modules, code and parameters that it had; their content is not compared."""
        snapshot = self._snapshot
        return snapshot is not None and snapshot.unchanged()

    def follow(self, kinds: Sequence[int]) -> bool:
        """Takes the tower as it is now, if its parameters have only moved, or were written what they held, or it has
        the same adapters active again, and the weights take pixels of all of `kinds`; waits for the GPU.

        Sharding and offloading free a parameter's memory after each use, and take other memory for the next. Who syncs
        weights writes those of a frozen tower, too. Prepared copies stay as they are; what is borrowed may lie
        elsewhere.
        """
        snapshot, taken = self._snapshot, self._taken
        if snapshot is None or taken is None or self._lost or not {*kinds} <= {*self.kinds}:
            return False
        now = snapshot.renewed()  # before the rest: whoever moves or writes them meanwhile is noticed
        in_place, written = snapshot.in_place(), now.versions() != snapshot.versions()
        if (in_place and snapshot.unchanged()) or not now.unchanged() or (written and self._digest is None):
            return False
        content = taken.content
        moved = content.moved(self._ops(content.sources.pointers.device))
        if moved is None or (written and moved.digest() != self._digest):
            return False
        lent = _lent_from(taken, content.parameters)
        if lent is None:
            return False
        self.moves += not in_place
        self._take(lent, moved, now, self._ingredients)
        return True

    def prepare(self) -> Reason | None:
        """Prepares weights from the tower as it stands, or says why it cannot run fused; waits for the GPU.

        Every way to prepared weights leads through here: the tower is checked first. Weights stay that are of what is
        there still, or again: a hook that came and went, or attention computed in another way, changes none.
        """
        source = self._source()
        reason = source.reason()
        if reason is None:
            reason = self._prepare(source)
        elif source.is_judged_by_state():
            self._note(reason, source)
        if reason is not None:
            self._snapshot = None  # whatever comes back is checked anew
            self._let_go(source)
        return reason

    def refusal(self) -> Reason | None:
        """Why the tower could not run fused when it was last judged, if it is as it was then; waits for the GPU only
        where weights were refused for what they hold."""
        last = self._refusal
        if last is None or not last.snapshot.renewed().unchanged():
            return None
        if last.holds is None:
            return last.reason if last.snapshot.in_place() else None
        with torch.inference_mode(False), torch.no_grad():
            return last.reason if last.holds() else None

    def _note(self, reason: Reason, source: Source) -> None:
        """Keeps a refusal for `refusal`, at the first, second, fourth, eighth... in a row: where the tower is another
        at each call that costs more than it spares."""
        self._refusal = None
        self._refusals += 1
        if self._refusals & (self._refusals - 1):
            return
        with torch.inference_mode(False), torch.no_grad():
            snapshot = attempted(source.snapshot)
        if isinstance(snapshot, Exception):  # whatever parameters somebody put there
            return
        if source.reason() == reason:  # nobody has changed it meanwhile
            self._refusal = _Refusal(reason, snapshot, None)

    def _prepare(self, source: Source) -> Reason | None:
        if self._lost:
            self._on_loss()
            self._lost, self._ingredients = False, None
        parameters = source.parameters()
        device = next(iter(parameters.values())).device
        self._on_prepare(device)
        with torch.inference_mode(False), torch.no_grad():
            snapshot = source.snapshot()  # before the weights, as content: what is written meanwhile will be noticed
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
            torch.cuda.current_stream(device).synchronize()  # whichever stream uses them next finds them written
        self.moves += kept is not None and weights.pointers() != self._pointers()
        self._take(weights, content, snapshot, ingredients)
        return None

    def _kept(
        self, now: ContentCheck, ingredients: Ingredients | None
    ) -> tuple[tuple[EncoderWeights, ContentCheck] | None, list[int] | None]:
        """The weights that are there, and a check of `now` with their copies, if they would be prepared so again: the
        same parameters with the same fingerprints, at the same versions or with the same digest. And the digest of what
        `now` read; None where none was taken."""
        taken, before = self._taken, self._ingredients
        if taken is None or ingredients is None or before is None or ingredients[0] != before[0]:
            return None, None
        whole = now.with_copies(taken.weights.copies(), self._ops(now.sources.pointers.device))
        lent = _lent_from(taken, now.parameters) if taken.content.agrees_with(whole) else None
        if lent is None:
            return None, None
        written = None in ingredients[1] or ingredients[1] != before[1]
        digest = now.digest() if written else self._digest  # at the first write there is none to compare with
        return (lent, whole) if digest == self._digest else None, digest

    def _prepared_anew(self, source: Source, content: ContentCheck) -> tuple[EncoderWeights, ContentCheck]:
        """Weights of what `content` read, in the memory of those before, and a check of their copies, too."""
        taken = self._taken
        self.repeats = self.repeats + 1 if taken is not None and _is_repeat(taken.content, content) else 0
        self._snapshot = self._ingredients = None  # where this fails on the way, copies are of neither tower
        weights = source.prepare(source.parameters(), None if taken is None else taken.weights)
        self.prepared += 1
        self.changes += not self._asked
        self._asked = False
        return weights, content.with_copies(weights.copies(), self._ops(content.sources.pointers.device))

    def _read(self, source: Source) -> ContentCheck:
        """What the parameters of `source` hold; waits for the GPU."""
        read = source.read()
        return ContentCheck.of(read, self._ops(read[0].device))

    def _let_go(self, source: Source) -> None:
        """Forgets weights that hold memory which the tower no longer has."""
        taken = self._taken
        if taken is not None and not taken.content.held_by(source.each_parameter()):
            self.version += 1
            self._on_move()  # before these are forgotten: interrupted between, who reads them would stay
            self._forget()

    def _pointers(self) -> tuple[int, ...]:
        taken = self._taken
        return () if taken is None else taken.pointers

    def _take(
        self, weights: EncoderWeights, content: ContentCheck, snapshot: Snapshot, ingredients: Ingredients | None
    ) -> None:
        """Puts these in place of those before. In this order, as others may be running, and an interrupt may end it
        anywhere: until the snapshot is there no run is accepted and the next call prepares, and by then one that found
        the weights before has begun with an older version."""
        taken, before = _Taken.of(weights, content), self._pointers()
        self._snapshot = self._refusal = None
        self._refusals = 0
        if before and before != taken.pointers:
            self._on_move()
        self._taken = taken
        self._ingredients = ingredients
        self.version += 1
        self._snapshot = snapshot
