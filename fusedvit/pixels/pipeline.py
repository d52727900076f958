"""Whether what lies between an image and its patches is the code that transformers defines.

Our kernels stand for that code, so that whoever replaces a part of it (a subclass, a method set on a class, a function
set in a module) must get the original code. The walk begins with the methods of a processor's class and follows the
functions that their code mentions. It is repeated where one of these has been replaced since.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from fusedvit.checks.source_code import definition_of, names_in

_INTAKE = ("_prepare_input_videos", "process_image", "convert_to_rgb")
_PATCHES = ("_preprocess", "resize", "pad", "patchify", "rescale", "normalize", "rescale_and_normalize")
_FOLLOWED = (*_INTAKE, *_PATCHES, "_fuse_mean_std_and_rescale_factor")
PIPELINE = frozenset(  # methods between images and patches, of which some are not called where our kernels run
    {"preprocess", "_preprocess_image_like_inputs", "_prepare_image_like_inputs", *_FOLLOWED}
)
_SIZES = "smart_resize"  # runs as it is, whosever it is
_OWN = ("transformers.", "torchvision.")


@dataclass(frozen=True, eq=False)
class Pipeline:
    """What a processor's class runs; another object after every change.

    Attributes:
        foreign: names of what is not transformers' or torchvision's own.
        slots: (lookup in a class or module, name) of everything that was followed.
        values: what was found there.
    """

    foreign: tuple[str, ...]
    slots: tuple[tuple[Callable[[str], object], str], ...]
    values: list[object]

    def unchanged(self) -> bool:
        return [lookup(name) for lookup, name in self.slots] == self.values


_walked: dict[type, Pipeline] = {}


def pipeline_of(cls: type) -> Pipeline:
    """What processors of class `cls` run now."""
    found = _walked.get(cls)
    if found is None or not found.unchanged():
        found = _walked[cls] = _walk(cls)
    return found


def is_plain(part: Any, cls: type) -> bool:
    """Whether nobody replaced a part of what `part`, made as a `cls`, runs between images and patches."""
    return PIPELINE.isdisjoint(part.__dict__) and not pipeline_of(cls).foreign


def _walk(cls: type) -> Pipeline:
    foreign: set[str] = set()
    slots: dict[tuple[int, str], tuple[Callable[[str], object], str]] = {}
    values: list[object] = []
    classes = [each for each in cls.__mro__ if each is not object]
    pending: list[tuple[Any, str]] = [(each, name) for name in sorted(PIPELINE) for each in classes]
    while pending:
        owner, name = pending.pop()
        if (id(owner), name) in slots:
            continue
        lookup = vars(owner).get
        slots[id(owner), name] = lookup, name
        values.append(value := lookup(name))
        if value is None or name == _SIZES:
            continue
        function = _held(value)
        found = definition_of(function)
        if found is None or not found.module.startswith(_OWN):
            foreign.add(name)
        elif isinstance(owner, ModuleType) or name in _FOLLOWED:
            pending.extend(_mentioned(function))
    return Pipeline(tuple(sorted(foreign)), tuple(slots.values()), values)


def _held(value: object) -> Any:
    """What a cache of functools holds; anything else itself."""
    return getattr(value, "__wrapped__", None) if type(value).__name__ == "_lru_cache_wrapper" else value


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
