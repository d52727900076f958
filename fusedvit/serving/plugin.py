"""What the plugins of serving engines share: switch, options, and how they change an engine's code.

One environment variable switches plugins off, another holds their options:

    FUSEDVIT_DISABLE=1   leaves the engine as it is; 0, false, no and off do not
    FUSEDVIT_CONFIG      options of `FuseConfig` as JSON: '{"token_budgets": [4096], "strict": true}', and
                         "gather_sharded": false, which leaves towers with sharded weights to the engine
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusedvit.config import FuseConfig
from fusedvit.errors import PREFIX, from_json, unnamed
from fusedvit.families.base import Family
from fusedvit.runtime.captured_encoder import limits_for

VARIABLES = "FUSEDVIT_"  # how names of environment variables begin
DISABLE, CONFIG = f"{VARIABLES}DISABLE", f"{VARIABLES}CONFIG"
_NOT_DISABLED = ("", "0", "false", "no", "off")
_GATHER = "gather_sharded"
_LEFT = "_fusedvit_left"  # in the __dict__ of a module that runs the engine's own code from the start: why
HELD = "module"  # in the __dict__ of vLLM's module in place of a tower that it does not call: the tower
_WRAPPED = "_fusedvit_wrapped"  # on functions that were replaced

_logger = logging.getLogger("fusedvit")

Patches = Mapping[str, Callable[[ModuleType], None]]
Classes = Mapping[tuple[str, str], Family]


def options() -> FuseConfig:
    """The options in `FUSEDVIT_CONFIG`. `compile` is "now" by default: kernels are compiled as an engine starts.

    Raises:
        ValueError: the variable is no JSON object of `FuseConfig`'s options; the message names what is wrong.
    """
    return _options()[0]


def disabled() -> str:
    """Why no tower may be fused; "" if it may. Asked for each tower: an engine may have been changed before."""
    return "" if os.environ.get(DISABLE, "").strip().lower() in _NOT_DISABLED else f"{DISABLE} is set"


def is_strict() -> bool:
    """Whether `FUSEDVIT_CONFIG` asks for an error where a tower cannot run fused."""
    return not disabled() and options().strict


def check_options(family: Family, vision_config: Any) -> None:
    """Raises ValueError if `FUSEDVIT_CONFIG` is invalid, or has options that the tower of `vision_config` cannot meet,
    however much memory is free."""
    if disabled():
        return
    given = options()
    try:
        spec = family.spec_from_config(vision_config)
    except Exception:  # the tower then runs the engine's own code, and a log line says why
        return
    try:
        limits_for(spec, torch.float32, 0, given.token_budgets, given.max_items, given.max_frames)
    except (ValueError, TypeError) as error:
        raise ValueError(f"fusedvit: {CONFIG}: {unnamed(error)}") from error


def may_gather() -> bool:
    """Whether shards of a tower's weights may be gathered into a whole copy on each GPU."""
    return _options()[1]


def _options() -> tuple[FuseConfig, bool]:
    text = os.environ.get(CONFIG, "").strip()
    try:
        given = from_json(text) if text else {}
        if not isinstance(given, dict):
            raise ValueError(f"expected an object, got {type(given).__name__}")
        gather = given.pop(_GATHER, True)
        if not isinstance(gather, bool):
            raise ValueError(f"{_GATHER} must be true or false, got {gather!r}")
        known = [*(f.name for f in fields(FuseConfig)), _GATHER]
        unknown = given.keys() - set(known)
        if unknown:
            raise ValueError(f"unknown option {min(unknown)!r}, expected {known}")
        return FuseConfig(**{"compile": "now", **given}), gather
    except (ValueError, TypeError) as error:
        raise ValueError(f"fusedvit: {CONFIG}={text}: {unnamed(error)}") from error


def install(patches: Patches, engine: str) -> None:
    """Applies `patches` to their modules, now or at the end of the modules' import; a repeated call changes nothing.

    A patch must skip what it has already changed, as `wrap` does. Nothing is changed where plugins are switched off.

    Args:
        engine: the name of the engine's logger, whose handlers get our warnings, too.

    Raises:
        ValueError: as `options`; the modules are changed all the same, as an engine may log the error and go on.
    """
    if disabled():
        return
    if not _logger.handlers:  # else the application has its own for us, and would print each line twice
        _logger.parent = logging.getLogger(engine)
    for name in [*patches]:
        if name in sys.modules:
            patches[name](sys.modules[name])
    if not any(isinstance(finder, _AfterImport) and finder.patches is patches for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(patches))
    options()


def known_classes(
    module: ModuleType, table: Classes, wrong_in: Callable[[Any], str], engine: str, logger: logging.Logger
) -> Iterator[tuple[Any, Family]]:
    """The classes of `table` that `module` defines, each with its family; a class that differs from the known releases
    is logged and left out, and its instances are noted as left to the engine.

    Args:
        table: (module, class) -> the family.
        wrong_in: how a class differs from the known releases; "" if it does not.
    """
    for (home, name), family in table.items():
        if home != module.__name__:
            continue
        cls = vars(module).get(name)
        wrong = f"{engine} has no such class any more" if cls is None else wrong_in(cls)
        if wrong:
            logger.warning("fusedvit: %s runs %s's own code: %s", name, engine, wrong)
            if cls is not None:
                wrap(cls, "__init__", functools.partial(_construct_unknown, wrong))
        else:
            yield cls, family


def _construct_unknown(wrong: str, original: Callable[..., None], module: Any, *args: Any, **kwargs: Any) -> None:
    original(module, *args, **kwargs)
    note_left(module, type(module).__name__, wrong)


def note_left(module: Any, name: str, why_not: str, is_used: bool = True) -> None:
    """Notes why a tower, or the model that holds it, runs the engine's own code from the start.

    Args:
        name: the class's.
        is_used: whether the engine will call the tower.

    Raises:
        RuntimeError: the tower is used, and the options are strict.
    """
    vars(module)[_LEFT] = why_not
    if is_used and is_strict():
        raise RuntimeError(f"{PREFIX}{name} cannot run fused: {why_not}")


def left_in(model: object, engine: str) -> dict[str, dict[str, Any]]:
    """What stands in place of counters for each module in `model` that `note_left` noted, by its path."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    found = ((path, vars(m).get(_LEFT) or getattr(vars(m).get(HELD), _LEFT, "")) for path, m in modules)
    return {path: {"state": f"{engine}'s own code: {why_not}"} for path, why_not in found if why_not}


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> bool:
    """Replaces a function that the class or module `owner` holds: `around(original, *args, **kwargs)` runs instead.

    Returns whether `owner` has such a function.
    """
    original = vars(owner).get(name)
    if original is None or hasattr(original, _WRAPPED):
        return original is not None

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, _WRAPPED, True)
    setattr(owner, name, wrapper)
    return True


def unwrapped(function: Any) -> Any:
    """The function that `wrap` replaced by `function`; `function` itself if it replaced none."""
    return function.__wrapped__ if hasattr(function, _WRAPPED) else function


def unknown_release(engine: str, version: str, known: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """Why an engine's release is not supported; "" where it lies in `known`, the first and the last release."""
    release = tuple(map(int, re.findall(r"\d+", version)[: len(known[0])]))
    if known[0] <= release <= known[1]:
        return ""
    first, last = (".".join(map(str, each)) for each in known)
    return f"{engine} {version} is not known to this release of fusedvit, which knows {first} to {last}"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes a module of `patches` at the end of its import."""

    def __init__(self, patches: Patches) -> None:
        self.patches = patches
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.patches or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.patches[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
