"""The result of following a tower's code: the record that change detection compares with, and its collection."""

from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from fusedvit.checks.module_calls import CALL

CALLED = ("forward", *CALL)  # methods that run when a module is called


@dataclass(frozen=True)
class OwnCode:
    """The original code that a tower would run.

    Attributes:
        foreign: the first code that is not transformers' or torch's own, and where it is; "" if there is none.
        slots: every (class or module, attribute name) that was followed; change detection compares the values by
            identity.
        registries: every (registry of attention functions, name) that a call would look up; compared likewise.
        functions: every function that was followed.
        names: every name that the code mentions, including attributes, except names that only affect how gradients are
            computed; and the names in the engine's record.
        optional: attributes that the code reads by `getattr` or `hasattr`, and can do without.
        methods: names of the methods, apart from `forward`, that a class's code calls.
        absent: (live keys of a class or module, names that it must not gain, as they would shadow what was followed).
    """

    foreign: str
    slots: tuple[tuple[Any, str], ...]
    registries: tuple[tuple[dict[str, Any], str], ...]
    functions: tuple[FunctionType, ...]
    names: frozenset[str]
    optional: frozenset[str]
    methods: Mapping[type, tuple[str, ...]]
    absent: tuple[tuple[KeysView[str], frozenset[str]], ...]


@dataclass
class Findings:
    """The findings so far; attributes as in `OwnCode`."""

    foreign: str = ""
    slots: dict[tuple[int, str], tuple[Any, str]] = field(default_factory=dict)
    registries: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    functions: dict[int, FunctionType] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    absent: dict[int, tuple[Any, set[str]]] = field(default_factory=dict)

    def note_foreign(self, what: str, owner: Any = None, name: str = "") -> None:
        """Keeps `what` if it is the first foreign code.

        Args:
            owner, name: its slot, so that change detection notices when it goes; left out for slots followed anyway.
        """
        self.foreign = self.foreign or what
        if owner is not None:
            self.note_slot(owner, name)

    def note_slot(self, owner: Any, name: str) -> None:
        self.slots[id(owner), name] = owner, name

    def note_absent(self, owner: Any, names: Iterable[str]) -> None:
        self.absent.setdefault(id(owner), (owner, set()))[1].update(names)

    def keep(self, value: object) -> None:
        """Has each call compare the body of `value`, if it is a function."""
        if type(value) is FunctionType:
            self.functions.setdefault(id(value), value)

    def methods(self) -> dict[type, tuple[str, ...]]:
        """Methods that were followed, by their class."""
        found: dict[type, tuple[str, ...]] = {}
        for owner, name in self.slots.values():
            if isinstance(owner, type) and name not in CALLED and not name.startswith("__"):  # found on classes only
                found[owner] = (*found.get(owner, ()), name)
        return found
