"""The tower as the source of prepared weights: whether it may run fused as it stands, and what it consists of."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from fusedvit.checks import fallback
from fusedvit.checks.accelerate_hooks import hooks_of
from fusedvit.checks.adapters import Plain, active_adapters, cannot_fold, dotted, folded, modules_read, not_dense
from fusedvit.checks.arguments import keep_rules
from fusedvit.checks.as_built import (
    Built,
    wrong_attributes,
    wrong_buffers,
    wrong_modules,
    wrong_parameters,
    wrong_spec,
)
from fusedvit.checks.change_detection import Snapshot
from fusedvit.checks.forward_hooks import hooked
from fusedvit.checks.own_code.findings import OwnCode
from fusedvit.checks.own_code.tower_code import own_code
from fusedvit.checks.ownership import foreign_class
from fusedvit.checks.recorded import version_of
from fusedvit.checks.source_code import UnreadSource
from fusedvit.errors import BEYOND_FP16, OF_ODD_OBJECTS, Reason, attempted, first_line
from fusedvit.families.base import Family
from fusedvit.families.engine import HUGGING_FACE
from fusedvit.model.digest import has_memory
from fusedvit.model.fp16_range import BeyondFp16, Products
from fusedvit.model.normalization import Normalization
from fusedvit.model.param_names import buffer_shapes
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights

FINGERPRINTED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MOST_IN_BUFFERS = 2**16  # buffer values that are read to be compared; towers have 10 to 40 rotary frequencies


@dataclass
class CheckedTower:
    """Implements `runtime.weight_cache.Source`.

    Attributes:
        built: the tower's structure as a serving engine built it. None for Hugging Face's towers, which are compared
            with a second tower, built from the same config.
        normalizations: normalisations of the byte pixels that the tower must take: see `prepare_weights.prepare`.
        wrong_parameters: what is wrong with the parameters; "" for nothing. Shards have other shapes.
    """

    tower: nn.Module
    family: Family
    spec: VisionSpec
    built: Built | None = None
    normalizations: Mapping[bool, Normalization] = field(default_factory=dict)
    wrong_parameters: Callable[[Plain, Family, VisionSpec], str] = wrong_parameters
    _code: OwnCode | None = field(default=None, init=False)
    _by_state: bool = field(default=False, init=False)

    def reason(self) -> Reason | None:
        """See `Source`."""
        try:
            found = attempted(self._reason, *OF_ODD_OBJECTS)
        except UnreadSource as why:
            self._by_state = False
            return Reason(fallback.UNREAD, str(why))
        if isinstance(found, Exception):
            return Reason(fallback.MODIFIED, f"it cannot be judged: {type(found).__name__}: {first_line(found)}")
        return found

    def is_judged_by_state(self) -> bool:
        """See `Source`. False for reasons in the config or in the content of buffers, or found before code is read."""
        return self._by_state

    def _reason(self) -> Reason | None:
        self._by_state = False
        found = self._structure()
        if isinstance(found, Reason):
            return found
        plain, built = found
        wrong = wrong_modules(plain, built, self.family, self.spec)
        self._code = own_code(plain, self.family.engine)
        self._by_state = not wrong or bool(self._code.foreign)
        if wrong:
            return Reason(fallback.MODIFIED, wrong)
        if self._code.foreign:
            return Reason(fallback.FOREIGN_CODE, self._code.foreign)
        keep_rules(self.tower)
        reason = _reason_of_parameters(plain.parameters())
        if reason is not None:
            return reason
        wrong = wrong_attributes(plain, built, self.family, self.spec, self._code)
        if not wrong:
            if self.built is None:
                built.keep(self.tower)
            self._by_state = False
            wrong = wrong_buffers(self.tower, self.family, self.spec, self._code.names)
        return Reason(fallback.MODIFIED, wrong) if wrong else None

    def _structure(self) -> Reason | tuple[Plain, Built]:
        """The tower without adapters, and the structure to compare it with; or why its modules cannot run fused."""
        tower, family, spec = self.tower, self.family, self.spec
        path = hooked(tower)
        if path:
            return Reason(fallback.HOOKS, f"on {path}")
        foreign = foreign_class(tower, family.engine)
        if foreign:
            return Reason(fallback.FOREIGN_CODE, foreign)
        plain = Plain.of(tower)
        adapter = cannot_fold(plain)
        if adapter:
            return Reason(fallback.ADAPTER, adapter)
        meta = _offloaded(plain)
        if meta:
            return Reason(fallback.META, meta)
        wrong = wrong_spec(tower, family, spec) or self.wrong_parameters(plain, family, spec)
        if wrong:
            return Reason(fallback.MODIFIED, wrong)
        built = attempted(lambda: Built.like(tower)) if self.built is None else self.built
        if isinstance(built, Exception):  # a constructor of transformers may raise anything for a changed config
            return Reason(fallback.MODIFIED, f"transformers builds no such tower from its config: {built}")
        return plain, built

    def reason_of_fp16(self) -> Reason | None:
        """Why fp16 cannot hold what is prepared of the weights, or None; `reason` does not look for it. It prepares
        them to find out, and waits for the GPU."""
        parameters = self.parameters()
        if next(iter(parameters.values())).dtype != torch.float16:
            return None
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.prepare(parameters, None)
        except BeyondFp16 as why:
            return Reason(BEYOND_FP16, str(why))
        return None

    def each_parameter(self) -> Iterator[torch.Tensor]:
        """See `Source`."""
        return (p for p in self.tower.parameters() if isinstance(p, torch.Tensor))  # a registry may hold any object

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """See `Source`."""
        named = self.tower.named_parameters(remove_duplicate=False)
        return {name: p for name, p in named if isinstance(p, torch.Tensor)}

    def read(self) -> list[torch.Tensor]:
        """See `Source`."""
        device = next(self.tower.parameters()).device
        buffers = [b for b in self._buffers_read().values() if b.device == device and b.numel()]
        return [*self._parameters_read().values(), *buffers]

    def prepare(self, parameters: Mapping[str, torch.Tensor], reuse: EncoderWeights | None) -> EncoderWeights:
        """See `Source`."""
        plain, products = Plain.of(self.tower), Products()
        buffers = dict(self.tower.named_buffers(remove_duplicate=False))
        new: frozenset[str] = frozenset()
        if plain.layers:
            parameters, new = folded(plain, products)
        turned = {name: p.data.contiguous() for name, p in parameters.items() if not p.is_contiguous()}
        own = frozenset(self.family.aliases.get(name, name) for name in (*new, *turned))
        tensors = {name: t.data for name, t in {**buffers, **parameters, **turned}.items()}  # see `kernels.fingerprint`
        source, names = self.family.source(tensors), self.family.names
        rotary = None
        if self.family.engine == HUGGING_FACE:  # casting a tower rounds its frequencies, for good
            found = (b for path, b in buffers.items() if path.rpartition(".")[2] == "inv_freq" and not b.is_meta)
            rotary = next(found, None)
        return prepare(
            self.spec,
            names,
            source,
            reuse=reuse,
            own=own,
            normalizations=self.normalizations,
            inv_freq=rotary,
            products=products,
        )

    def snapshot(self) -> Snapshot:
        """See `Source`."""
        return Snapshot.of(self.tower, self._own_code(), self._buffer_names())

    def ingredients(self) -> tuple[object, list[int | None]] | None:
        """(What `prepare` reads apart from the content of parameters, the version of each parameter).

        The first part also identifies the parameters. It is equal if `prepare` would give the same weights from the
        same content. A version is None for a parameter that counts none. The result is None if buffers are too large to
        be compared. Parameters are identified by `id`, so they must be kept alive while results are compared.
        """
        parameters, adapters = self._parameters_read(), Plain.of(self.tower).layers
        buffers = self._buffers_prepared_from()
        if sum(b.numel() for b in buffers.values()) > MOST_IN_BUFFERS:
            return None
        values = [None if b.is_meta else b.tolist() for b in buffers.values()]  # by value: moving a tower replaces them
        folded_in = [(path, n, layer.scaling[n]) for path, layer in adapters.items() for n in active_adapters(layer)]
        kinds = [(b.dtype, b.device) for b in buffers.values()]
        named = [(name, id(p)) for name, p in parameters.items()]
        rest = named, [*buffers], kinds, values, folded_in, dict(self.normalizations)
        return rest, list(map(version_of, parameters.values()))

    def _parameters_read(self) -> dict[str, torch.Tensor]:
        """The parameters of `parameters` except those of inactive adapters."""
        found = ((dotted(path, n), p) for path, m in modules_read(self.tower) for n, p in m._parameters.items())
        return {name: p for name, p in found if isinstance(p, torch.Tensor)}

    def _buffers_read(self) -> dict[str, torch.Tensor]:
        names, found = self._buffer_names(), self.tower.named_buffers(remove_duplicate=False)
        return {path: buffer for path, buffer in found if path.rpartition(".")[2] in names}

    def _buffers_prepared_from(self) -> dict[str, torch.Tensor]:
        """The buffers that `prepare` reads. Not an engine's rotary tables, which `reason` compares with the config."""
        engine, found = self.family.engine, self._buffers_read()
        unread = () if engine == HUGGING_FACE else engine.buffers
        return {path: buffer for path, buffer in found.items() if path.rpartition(".")[2] not in unread}

    def _buffer_names(self) -> frozenset[str]:
        """Names that the code mentions, and names of buffers in the family's and engine's records."""
        given = (path.rpartition(".")[2] for path, _ in buffer_shapes(self.family.names, self.spec))
        return self._own_code().names.union(self.family.engine.buffers, given)

    def _own_code(self) -> OwnCode:
        if self._code is None:
            self._code = own_code(Plain.of(self.tower), self.family.engine)
        return self._code


def _offloaded(plain: Plain) -> str:
    """The first parameter on the meta device, and whether accelerate offloads it; "" if there is none."""
    name = _first(plain.parameters(), lambda p: getattr(p, "is_meta", False))
    by_accelerate = name and hooks_of(plain.modules[name.rpartition(".")[0]])
    return f"{name}, which accelerate offloads" if by_accelerate else name


def _reason_of_parameters(parameters: Mapping[str, torch.Tensor]) -> Reason | None:
    freed = _first(parameters, lambda p: type(p) is nn.Parameter and not has_memory(p))
    if freed:
        return Reason(fallback.FREED, freed)
    first, parameter = next(iter(parameters.items()))
    device, dtype = parameter.device, parameter.dtype
    other = _first(parameters, lambda p: p.device != device)
    if other:
        return Reason(fallback.DEVICES, f"{other} is on {parameters[other].device}, {first} on {device}")
    other = _first(parameters, lambda p: p.dtype != dtype)
    if other:
        return Reason(fallback.DTYPES, f"{other} is {parameters[other].dtype}, {first} {dtype}")
    if not _device_runs(device):
        return Reason(fallback.UNSUPPORTED_DEVICE, str(device))
    if dtype not in (FINGERPRINTED if device.type == "cpu" else FINGERPRINTED[:3]):
        return Reason(fallback.UNSUPPORTED_DTYPE, str(dtype))
    sparse = _first(parameters, lambda p: bool(not_dense(p)))
    return Reason(fallback.MODIFIED, f"{sparse} is {not_dense(parameters[sparse])}") if sparse else None


def _first(parameters: Mapping[str, torch.Tensor], wanted: Callable[[torch.Tensor], bool]) -> str:
    return next((name for name, parameter in parameters.items() if wanted(parameter)), "")


def _device_runs(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
