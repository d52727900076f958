"""What an `Embedder` is built from: its options, checked first, and a checkpoint's tower and processors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fusedvit.checkpoint import default_dtype, device_or_default, load_tower
from fusedvit.config import FuseConfig
from fusedvit.errors import InputError, as_input_error, first_line, shown
from fusedvit.pixels import media
from fusedvit.pixels.arguments import usable_device
from fusedvit.pixels.processors import PARTS

OUTPUTS = ("mean", "tokens")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHECKPOINT = (str, Path)


def check_model(model: Any, processor: Any, encode: Any) -> None:
    """Raises TypeError if `Embedder` does not take these three together."""
    if not isinstance(model, str | Path | nn.Module):
        raise _wrong("model", "a checkpoint's folder or hub name, or a model", model)
    if encode is not None and not callable(encode):
        raise _wrong("encode", "a function (model, processor, images)", encode)
    if encode is not None and isinstance(model, _CHECKPOINT):
        raise TypeError("fusedvit: encode= takes a model that is loaded, with its processor, not a checkpoint's name")
    if processor is None and not isinstance(model, _CHECKPOINT):
        raise TypeError("fusedvit: a model that is loaded needs its processor: Embedder(model, processor)")
    if processor is not None and not callable(processor) and not any(hasattr(processor, name) for name in PARTS):
        raise _wrong("processor", "an image processor, or what holds one", processor)


def check_options(output: Any, deepstack: Any, threads: Any, limits: Any, config: Any) -> None:
    """Raises ValueError or TypeError for an invalid option."""
    if output not in OUTPUTS:
        raise ValueError(f"fusedvit: output must be one of {OUTPUTS}, got {shown(output)}")
    if not isinstance(deepstack, bool):
        raise _wrong("deepstack", "True or False", deepstack)
    media.check_options("raise", limits, threads, called=False)
    if not isinstance(config, FuseConfig | None):
        raise _wrong("config", "FuseConfig or None", config)


def device_and_dtype(model: Any, device: Any, dtype: Any) -> tuple[torch.device, torch.dtype]:
    """The device and dtype in which a checkpoint is loaded.

    Raises:
        TypeError, ValueError: there is no such device or dtype, or one is given for a model that is already loaded.
    """
    if not isinstance(model, _CHECKPOINT) and (device, dtype) != (None, None):
        raise TypeError("fusedvit: device= and dtype= are a checkpoint's; move a model that is loaded by itself")
    if not isinstance(device, str | torch.device | None):
        raise _wrong("device", "cpu, cuda or cuda:N", device)
    if not isinstance(dtype, torch.dtype | None):
        raise _wrong("dtype", "a torch.dtype", dtype)
    if dtype not in (None, *_DTYPES):
        raise ValueError(f"fusedvit: dtype: one of {', '.join(map(str, _DTYPES))} expected, got {dtype}")
    on = device_or_default(None) if device is None else usable_device(device)
    return on, dtype or default_dtype(on)


def _wrong(name: str, expected: str, got: Any) -> TypeError:
    return TypeError(f"fusedvit: {name}: {expected} expected, got {type(got).__name__}")


def loaded(model: str | Path | nn.Module, on: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model, or the tower of a checkpoint."""
    return load_tower(str(model), on, dtype) if isinstance(model, _CHECKPOINT) else model


def processors_of(where: str) -> Any:
    """A checkpoint's image processor, and its video processor if transformers can build it. If a package is missing for
    that, `no_video` is the error message for videos.

    Raises:
        InputError: the checkpoint has no image processor that transformers reads.
    """
    from transformers import AutoVideoProcessor

    video, no_video = None, None
    try:
        video = AutoVideoProcessor.from_pretrained(where)
    except ImportError as error:
        missing = f"{where}: its video processor needs a package that is missing: {first_line(error).split('. ')[0]}"
        no_video = f"{missing}: pip install torchvision, in the release that goes with torch"
    except (OSError, ValueError):  # none in the checkpoint
        video = None
    except Exception as error:  # TypeError and others, where its JSON file holds null or a list
        raise InputError(f"{where}: no video processor that transformers reads: {first_line(error)}") from None
    return SimpleNamespace(image_processor=image_processor_of(where), video_processor=video, no_video=no_video)


def image_processor_of(where: str) -> Any:
    """A checkpoint's image processor. Raises InputError if transformers finds none that it can read."""
    from transformers import AutoImageProcessor

    with as_input_error(f"{where}: no image processor that transformers reads"):  # it raises many types
        return AutoImageProcessor.from_pretrained(where)
