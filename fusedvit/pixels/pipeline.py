"""Whether the code between an image and its patches is the code that transformers defines.

Our kernels replace that code. If a user has changed a part of it (a subclass, a method set on a class, a function set
in a module), the changed code must run instead. The walk begins with the methods of a processor's class and follows the
functions that their code mentions. It is repeated once one of these has been replaced.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any

from fusedvit.checks.ownership import held_function
from fusedvit.checks.source_code import UnreadSource, definition_of, names_in

_INTAKE = ("_prepare_input_videos", "process_image", "convert_to_rgb")
_PATCHES = ("_preprocess", "resize", "pad", "patchify", "rescale", "normalize", "rescale_and_normalize")
_FOLLOWED = (*_INTAKE, *_PATCHES, "_fuse_mean_std_and_rescale_factor")
PIPELINE = frozenset(  # methods between images and patches, some of which our kernels replace
    {"preprocess", "_preprocess_image_like_inputs", "_prepare_image_like_inputs", *_FOLLOWED}
)
_SIZES = "smart_resize"  # always runs itself, so it may be anybody's
_OWN = ("transformers.", "torchvision.")


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The functions that a processor's class runs; a new object after every change.

    Attributes:
        foreign: names of functions that are not transformers' or torchvision's own.
        of_classes: namespaces of the classes that were followed, and the names that were looked up in them.
        of_modules: the same for modules.
        values: the values of these names, those of classes first.
    """

    foreign: tuple[str, ...]
    of_classes: tuple[tuple[Any, ...], tuple[str, ...]]
    of_modules: tuple[tuple[Any, ...], tuple[str, ...]]
    values: list[object]

    def unchanged(self) -> bool:
        """Runs once per image and once per call, so its loop is in C."""
        found = *map(MappingProxyType.get, *self.of_classes), *map(dict.get, *self.of_modules)
        return all(map(is_, found, self.values))


_walked: dict[type, Pipeline] = {}


def pipeline_of(cls: type) -> Pipeline:
    """The functions that processors of class `cls` run now.

    Raises:
        UnreadSource: their source cannot be read for now.
    """
    found = _walked.get(cls)
    if found is None or not found.unchanged():
        found = _walked[cls] = _walk(cls)
    return found


def as_checked(cls: type) -> Pipeline:
    """The last result of `pipeline_of(cls)`, not compared again."""
    return _walked[cls]


def is_plain(part: Any, cls: type) -> bool:
    """Whether `part`, a processor of class `cls`, runs only the libraries' own code between images and patches."""
    try:
        return PIPELINE.isdisjoint(part.__dict__) and not pipeline_of(cls).foreign
    except UnreadSource:  # the next call tries again
        return False


def _walk(cls: type) -> Pipeline:
    foreign: set[str] = set()
    slots: dict[tuple[int, str], tuple[Any, str, object]] = {}
    classes = [each for each in cls.__mro__ if each is not object]
    pending: list[tuple[Any, str]] = [(each, name) for name in sorted(PIPELINE) for each in classes]
    while pending:
        owner, name = pending.pop()
        if (id(owner), name) in slots:
            continue
        value = vars(owner).get(name)
        slots[id(owner), name] = vars(owner), name, value
        if value is None or name == _SIZES:
            continue
        function: Any = held_function(value)
        found = definition_of(function)
        if found is None or not found.module.startswith(_OWN):
            foreign.add(name)
        elif isinstance(owner, ModuleType) or name in _FOLLOWED:
            pending.extend(_mentioned(function))
    kinds = [[slot for slot in slots.values() if type(slot[0]) is kind] for kind in (MappingProxyType, dict)]
    spaces = [(tuple(space for space, _, _ in of), tuple(name for _, name, _ in of)) for of in kinds]
    return Pipeline(tuple(sorted(foreign)), spaces[0], spaces[1], [value for of in kinds for _, _, value in of])


def _mentioned(function: FunctionType) -> Iterator[tuple[Any, str]]:
    """Functions of transformers' modules, and of torchvision's, whose names the code of `function` mentions."""
    scope, names = function.__globals__, names_in(function.__code__)
    if not scope["__name__"].startswith("transformers."):
        return
    home = sys.modules[scope["__name__"]]
    modules = [value for value in (scope.get(name) for name in names) if isinstance(value, ModuleType)]
    for module in (home, *(module for module in modules if module.__name__.startswith("torchvision."))):
        for name in sorted(names & vars(module).keys()):
            if callable(vars(module)[name]) and not isinstance(vars(module)[name], type | BuiltinFunctionType):
                yield module, name
