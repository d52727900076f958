"""Hugging Face's image and video processors, changed in place so that they return bytes (`BytePixels`).

Only the steps after the decision about sizes are replaced. A processor keeps its class's name, its attributes and its
saved form; calls, sizes, grids and text are as before. A call that asks for anything but plain rescaling and
normalisation of 8-bit RGB runs the original code and returns floats.
"""

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fusedvit.checks.source_code import UnreadSource
from fusedvit.errors import InputError, UnsupportedModel, attempted
from fusedvit.model.normalization import Normalization
from fusedvit.model.spec import VisionSpec
from fusedvit.pixels.arguments import device_named, kind_of_argument
from fusedvit.pixels.byte_pixels import BytePixels, as_floats
from fusedvit.pixels.byte_processors import ORIGINAL, STATE, Home, as_class, classes_of
from fusedvit.pixels.pipeline import PIPELINE, pipeline_of
from fusedvit.pixels.processor_kinds import backend_of, kind_of, outputs_of

logger = logging.getLogger("fusedvit")

_OPTIONS = (
    "do_rescale",
    "do_normalize",
    "rescale_factor",
    "image_mean",
    "image_std",
    "patch_size",
    "temporal_patch_size",
)
_OF_CONFIGS = "to_diff_dict"  # a method of every config of transformers
PARTS = ("image_processor", "video_processor")  # attributes of Hugging Face's combined processors


def swap(processor: Any, device: torch.device | str | None = None) -> Any:
    """Makes the image and video processors in `processor` return bytes, in place.

    Args:
        processor: one of Hugging Face's processors, or an image or video processor itself.
        device: where patches are computed if a call has no `device=`. None means the device that this process gave
            before, else the current GPU, or the CPU if there is none. DataLoader workers and other processes compute on
            the CPU.

    Returns:
        `processor`.

    Raises:
        UnsupportedModel: `processor` holds neither an image nor a video processor whose patches we can compute.
        TypeError, ValueError: `device` is no device, or is not there.
    """
    home = Home(None if device is None else device_named(device), os.getpid())
    parts = _processors_in(processor)
    found = {name: _supported(part, _original_of(part)) for name, part in parts.items()}
    reasons = {
        name: f"{name} ({_original_of(parts[name]).__name__}) {reason}" for name, (reason, _) in found.items() if reason
    }
    if len(reasons) == len(parts):
        raise UnsupportedModel(f"{name_of(processor)} cannot give bytes: {'; '.join(reasons.values())}")
    for reason in reasons.values():
        logger.warning("fusedvit: left as it is, giving floats: %s", reason)
    for name in parts.keys() - reasons.keys():
        part = parts[name]
        before: Home | None = part.__dict__.get(STATE)
        known = before.device if before is not None and before.process == home.process else None
        part.__class__ = classes_of(_original_of(part)).swapped
        part.__dict__[STATE] = replace(home, device=home.device or known, ours=found[name][1])
    return processor


def restore(processor: Any) -> Any:
    """Gives the processors in `processor` their own classes back; returns `processor`. Raises TypeError if it is none
    of Hugging Face's."""
    check_processor(processor)
    for part in _processors_in(processor).values():
        _set(part, _original_of(part), None)
    return processor


def _set(part: Any, cls: Any, home: Home | None) -> None:
    if type(part) is not cls:  # some classes refuse assignment, even to their own instance
        part.__class__ = cls
    if home is None:
        part.__dict__.pop(STATE, None)
    else:
        part.__dict__[STATE] = home


@contextmanager
def as_before_on_error(processor: Any) -> Iterator[None]:
    """A context at whose error the image and video processors in `processor` are again as they were: they may have
    returned bytes before. A `processor` of None is ignored."""
    parts = () if processor is None else _processors_in(processor).values()
    before = [(part, type(part), part.__dict__.get(STATE)) for part in parts]
    try:
        yield
    except BaseException:
        for part, cls, home in before:
            _set(part, cls, home)
        raise


def check_processor(processor: Any) -> None:
    """Raises TypeError unless `processor` is a processor of Hugging Face's, or an image or video processor."""
    if isinstance(processor, type) or not all(map(_is_processor, _processors_in(processor).values())):
        got = kind_of_argument(processor)
        raise TypeError(f"fusedvit: processor must be a processor of transformers, as AutoProcessor gives, got {got}")


def _is_processor(part: Any) -> bool:
    """Whether `part` may be an image or video processor: models and configs can be saved too."""
    return hasattr(part, "save_pretrained") and not isinstance(part, torch.nn.Module) and not hasattr(part, _OF_CONFIGS)


def is_swapped(part: Any) -> bool:
    """Whether an image or video processor returns bytes."""
    return part is not None and STATE in part.__dict__


def swapped_in(processor: Any) -> list[Any]:
    """The image and video processors in `processor` that return bytes."""
    return [part for part in _processors_in(processor).values() if is_swapped(part)]


def gives_grids(part: Any) -> bool:
    """Whether an image or video processor returns bytes with a grid of patches, not with positions."""
    return is_swapped(part) and not classes_of(_original_of(part)).kind.padded


def normalizations_of(processor: Any) -> dict[bool, Normalization]:
    """The normalisations that swapped processors in `processor` leave to the tower's weights by default, by whether
    they are for still images. Those of padded images are not among them: no weights fold these."""
    found = {}
    for part in swapped_in(processor):
        kind = classes_of(_original_of(part)).kind
        normalization = kind.normalization(_options_of(part))
        if normalization is not None and not kind.padded:
            found[kind.still] = normalization
    return found


def _options_of(part: Any) -> dict[str, Any]:
    """The options of a call whose only argument is `return_tensors="pt"`."""
    return {name: getattr(part, name, None) for name in _OPTIONS} | {"return_tensors": "pt"}


def check_fits(processor: Any, spec: VisionSpec) -> None:
    """Raises InputError if an image or video processor in `processor` cuts other patches than a tower takes."""
    for part in _processors_in(processor).values():
        kind = kind_of(_original_of(part))
        if kind is None or kind.padded:  # no patches in a grid
            continue
        given = {name: getattr(part, name, None) for name in ("patch_size", "merge_size", "temporal_patch_size")}
        given["temporal_patch_size"] = kind.frames(given)  # ERNIE's video processor says 2, but a patch has one frame
        wrong = {name: got for name, got in given.items() if got not in (None, getattr(spec, name))}
        if wrong:
            expected = ", ".join(f"{name} {getattr(spec, name)}" for name in wrong)
            got = ", ".join(map(str, wrong.values()))
            name = _original_of(part).__name__
            raise InputError(f"{name} does not fit the tower: {expected} expected, got {got}")


def name_of(processor: Any) -> str:
    """The name of `processor` in messages: its class; for a plain namespace, the classes of the processors in it."""
    if not isinstance(processor, SimpleNamespace):
        return type(processor).__name__
    return " and ".join(dict.fromkeys(_original_of(part).__name__ for part in _processors_in(processor).values()))


def _processors_in(processor: Any) -> dict[str, Any]:
    """The image and video processors in `processor` by name; `processor` itself, as "it", if it has none."""
    found = {name: getattr(processor, name, None) for name in PARTS}
    parts = {name: part for name, part in found.items() if part is not None}
    return parts or {"it": processor}


def _original_of(part: Any) -> Any:
    return type(part).__dict__.get(ORIGINAL, type(part))


# ── what is supported ─────────────────────────────────────────────────────────────────────────────────────────────────


def _supported(part: Any, original: Any) -> tuple[str, bool]:
    """(why `part` is left alone, or ""; whether our kernels may run), found by comparing outputs for two small
    inputs."""
    backend, dtype = backend_of(original), torch.get_default_dtype()
    if backend is None:
        return "is of no backend that we know", False
    if backend.name == "torchvision" and dtype != torch.float32:
        return f"rounds its mean and deviation to torch's default dtype: torch.float32 expected, got {dtype}", False
    outputs = outputs_of(original)
    if outputs is None or (outputs[1] == "image_grid_thw" and getattr(original, "patchify", None) is None):
        return "does not cut images into patches with a grid or positions", False
    own = _own_code_of(part, original)
    if own:  # its results may depend on pixels that the comparison below does not try
        return own, False
    plain = copy.copy(part)
    plain.__class__ = original
    plain.__dict__.pop(STATE, None)
    differs = ""
    for ours in (False,) if classes_of(original).kind.padded else (True, False):
        differs = _difference(plain, Home(None, 0, ours, checking=True))
        if not differs:
            return "", ours
    return differs, False


def _own_code_of(part: Any, original: Any) -> str:
    """Which functions of `part` are not the libraries' own; "" for none."""
    try:
        own = (part.__dict__.keys() & PIPELINE).union(pipeline_of(original).foreign)
    except UnreadSource as why:
        return f"has code that cannot be read for now: {why}"
    return f"has code of its own: {', '.join(sorted(own))}" if own else ""


def _difference(plain: Any, home: Home) -> str:
    """How outputs of `plain` and of its swapped copy differ on the CPU; "" where bits and grids are equal."""
    equal = attempted(lambda: all(_agrees(plain, home, *size) for size in ((61, 97), (150, 60))))
    if isinstance(equal, Exception):  # an unknown processor's code may raise anything; it is then left alone
        return f"cannot be checked: {type(equal).__name__}: {equal}"
    return "" if equal else "lays patches out in another way, or gives more than patches and their grid"


def _agrees(plain: Any, home: Home, height: int, width: int) -> bool:
    original: Any = type(plain)
    classes = classes_of(original)
    kind = classes.kind
    frames = np.random.default_rng(0).integers(0, 256, (1 if kind.still else 3, height, width, 3), dtype=np.uint8)
    given = {"images": [frames[0]]} if kind.still else {"videos": [frames], "do_sample_frames": False}
    given |= {"return_tensors": "pt", "do_resize": True, "do_rescale": True, "do_normalize": True, "device": "cpu"}
    given["input_data_format"] = None  # whatever layout the processor expects of other images
    if kind.normalization(_options_of(plain) | given) is None:  # returns floats by default; compare bytes
        given["rescale_factor"] = 1 / 255
    if hasattr(plain, "draw_on_frames"):
        given["draw_on_frames"] = False  # drawing needs a font and the video's times
    swapped = as_class(classes.swapped, plain)
    swapped.__dict__[STATE] = home
    wanted, got = plain(**given), swapped(**given)
    return (
        set(got) == set(wanted)
        and (kind.padded or set(wanted) == set(kind.outputs))
        and isinstance(got[kind.outputs[0]], BytePixels)
        and all(torch.equal(as_floats(got[name]), value) for name, value in wanted.items())
    )
