"""What following a tower's code has found: the record that change detection compares with, and its making."""

from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from fusedvit.checks.module_calls import CALL

CALLED = ("forward", *CALL)  # what calling a module runs


@dataclass(frozen=True)
class OwnCode:
    """What a tower's original code consists of.

    Attributes:
        foreign: what is not transformers' or torch's own, and where; "" if nothing is.
        slots: (class or module, name) of everything that was followed.
        registries: (registry of attention functions, name) of what would be looked up.
        functions: every function that was followed.
        names: every name that the code mentions, attributes among them, but what only changes how gradients are
            computed; and what the engine's record names.
        optional: attributes that the code asks for by `getattr` or `hasattr`, and does without.
        methods: names of the methods, beside `forward`, that a class's code calls.
        absent: names that nobody has given a class or module so far, which would hide what the code finds by them now.
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
    """What was found so far; attributes as `OwnCode` has them."""

    foreign: str = ""
    slots: dict[tuple[int, str], tuple[Any, str]] = field(default_factory=dict)
    registries: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    functions: dict[int, FunctionType] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    absent: dict[int, tuple[Any, set[str]]] = field(default_factory=dict)

    def note_foreign(self, what: str, owner: Any = None, name: str = "") -> None:
        """Keeps the first.

        Args:
            owner, name: where it is kept, so that change detection sees it go; not where that is followed anyway.
        """
        self.foreign = self.foreign or what
        if owner is not None:
            self.note_slot(owner, name)

    def note_slot(self, owner: Any, name: str) -> None:
        self.slots[id(owner), name] = owner, name

    def note_absent(self, owner: Any, names: Iterable[str]) -> None:
        self.absent.setdefault(id(owner), (owner, set()))[1].update(names)

    def keep(self, value: object) -> None:
        """The body of `value`, if it is a function, is compared at each call."""
        if isinstance(value, FunctionType):
            self.functions.setdefault(id(value), value)

    def methods(self) -> dict[type, tuple[str, ...]]:
        """Methods that were followed, by their class."""
        found: dict[type, tuple[str, ...]] = {}
        for owner, name in self.slots.values():
            if isinstance(owner, type) and name not in CALLED and not name.startswith("__"):  # these of classes alone
                found[owner] = (*found.get(owner, ()), name)
        return found
