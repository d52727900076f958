"""Options of `fusedvit.fuse`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, ParamSpec, TypeVar

from fusedvit.errors import shown
from fusedvit.graphs.limits import MOST, check_limits

Given = ParamSpec("Given")
Result = TypeVar("Result")

COMPILE = ("background", "now")
SMALL = "small"


@dataclass(frozen=True)
class FuseConfig:
    """How a fused tower behaves.

    Attributes:
        token_budgets: sizes of the captured CUDA graphs in output (merged) tokens, ascending; kept as a tuple. The
            largest decides how much memory is held. At least four smaller sizes per octave are added, so that a small
            batch does not run in a large graph. None: chosen from the tower and the free memory.
        max_items: images and videos (or parts of videos) per graph; None: 64, at most as many as the largest budget has
            tokens and a given `max_frames`.
        max_frames: frames (attention sequences) per graph; None: four for each of `max_items` and at least 256, or as
            many as the largest budget has tokens if that is less.
        graphs: replay CUDA graphs on a GPU; False runs every call eagerly.
        strict: raise `RuntimeError` when a call would fall back to the original code.
        compile: "background": a call whose kernels are not compiled yet runs the original code, while low-priority
            processes compile them; "now": the call waits for its kernels. `strict` calls, `warmup()` and calls inside a
            stream capture always wait.
        memory: MiB of device memory that prepared weights, static buffers and graphs may hold together; "small": 1.2
            times the prepared weights. Token budgets are chosen within it. None: buffers take up to a tenth of the free
            memory.
        watch_data: detect writes that bypass autograd's version counter (`param.data.copy_(...)`) by a sampled
            fingerprint of the weights, read back together with `grid_thw`. False: such writes need
            `handle.refresh()`.

    Raises:
        TypeError: an option has the wrong type; the message names the option.
        ValueError: no tower can meet an option; the message names the option.
    """

    token_budgets: Sequence[int] | None = None
    max_items: int | None = None
    max_frames: int | None = None
    graphs: bool = True
    strict: bool = False
    compile: Literal["background", "now"] = "background"
    memory: Literal["small"] | int | None = None
    watch_data: bool = True

    def __post_init__(self) -> None:
        for name in ("graphs", "strict", "watch_data"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"fusedvit: {name} must be True or False, got {shown(getattr(self, name))}")
        _check_compile(self.compile)
        _check_memory(self.memory)
        if self.memory is not None and self.token_budgets is not None:
            raise ValueError("fusedvit: memory and token_budgets both choose how much is held: give one of them")
        items = 1 if self.max_items is None else self.max_items
        frames = items if self.max_frames is None else self.max_frames
        given = (MOST,) if self.token_budgets is None else self.token_budgets
        limits = check_limits(given, items, frames)
        if self.token_budgets is not None:  # a list could be changed after it was checked, and has no hash
            object.__setattr__(self, "token_budgets", limits.token_budgets)


OPTIONS = frozenset(field.name for field in fields(FuseConfig))


def check_config(config: object) -> None:
    """Raises TypeError unless `config` is a `FuseConfig`."""
    if isinstance(config, FuseConfig):
        return
    got = type(config).__name__
    instead = ": give a processor by its name, processor=..." if "Processor" in got else ""
    raise TypeError(f"fusedvit: config must be a FuseConfig, got {got}{instead}")


def takes_config(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A decorator of a function with a parameter `config`. The function raises TypeError, which says what to write, for
    an option of `FuseConfig` that is given to itself."""

    @functools.wraps(function)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        options = ", ".join(f"{name}={shown(value)}" for name, value in kwargs.items() if name in OPTIONS)
        if options:
            raise TypeError(f"fusedvit: options are given as config=FuseConfig({options}), got {options}")
        return function(*args, **kwargs)

    return checked


def _check_compile(compile: str) -> None:
    expected = " or ".join(map(repr, COMPILE))
    if not isinstance(compile, str):
        raise TypeError(f"fusedvit: compile must be {expected}, got {shown(compile)}")
    if compile not in COMPILE:
        raise ValueError(f"fusedvit: compile must be {expected}, got {shown(compile)}")


def _check_memory(memory: str | int | None) -> None:
    if memory is None or (isinstance(memory, str) and memory == SMALL):
        return
    if type(memory) is not int:
        said = f"fusedvit: memory must be {SMALL!r}, a whole number of MiB or None, got {shown(memory)}"
        raise ValueError(said) if isinstance(memory, str) else TypeError(said)
    if memory < 1:
        raise ValueError(f"fusedvit: memory must be at least 1 MiB, got {memory}")
