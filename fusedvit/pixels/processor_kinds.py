"""The kind of a Hugging Face image or video processor's class: its backend, its outputs, how it normalises."""

import inspect
from typing import Any, NamedTuple

import torch

from fusedvit.model.normalization import Normalization
from fusedvit.pixels.resize import PILLOW, TORCH, Resizing

_PIXELS = (("pixel_values", "image"), ("pixel_values_videos", "video"))
_OUTPUTS = tuple((pixels, f"{kind}_{lying}") for lying in ("grid_thw", "position_ids") for pixels, kind in _PIXELS)


class Backend(NamedTuple):
    """name: its name in `Normalization`; base: transformers' class; resizing: how it resizes on a CPU."""

    name: str
    base: Any
    resizing: Resizing


class Kind(NamedTuple):
    """Facts about a processor's class.

    Attributes:
        backend: the backend whose code resizes and normalises.
        outputs: names of the output with pixels, and of the one with the patches' grid or positions.
        joins_frames: a row of patches holds `temporal_patch_size` frames, not one.
    """

    backend: Backend
    outputs: tuple[str, str]
    joins_frames: bool

    @property
    def still(self) -> bool:
        return self.outputs[0] == "pixel_values"

    @property
    def padded(self) -> bool:
        """Images are padded to equal numbers of patches, and positions locate the patches, not a grid."""
        return self.outputs[1].endswith("position_ids")

    def frames(self, options: dict[str, Any]) -> int:
        """How many frames a row of patches holds."""
        joined = options["temporal_patch_size"] if self.joins_frames else None
        return 1 if joined is None else joined

    def normalization(self, options: dict[str, Any]) -> Normalization | None:
        """The normalisation that a call's options ask for; None unless they ask for normalised torch tensors."""
        pt = options.get("return_tensors") == "pt" or (
            options.get("return_tensors") is None and self.backend.name == "torchvision"
        )
        normalizes = options.get("do_normalize")
        if not (pt and options.get("do_rescale") and (normalizes or self.padded)):
            return None
        if self.backend.name == "torchvision" and torch.get_default_dtype() != torch.float32:
            return None  # torchvision would round mean and deviation to the default dtype
        try:
            found = Normalization(
                rescale_factor=options["rescale_factor"],
                mean=options["image_mean"] if normalizes else None,
                std=options["image_std"] if normalizes else None,
                patch=options["patch_size"],
                temporal_patch=self.frames(options),
                backend=self.backend.name,
            )
        except (ValueError, TypeError):  # the original code raises the error for wrong options
            return None
        fits = _suits_padding(found) if self.padded else found.foldable
        return found if fits else None


def _suits_padding(normalization: Normalization) -> bool:
    """Whether padded rows, which have the channels last, may be bytes. Their padding is 0, so the mean must be 0."""
    return not any(normalization.mean or ()) and len(set(normalization.std or ())) <= 1


def kind_of(original: Any) -> Kind | None:
    """The kind of a processor's class; None for an unknown backend or other outputs."""
    backend, outputs = backend_of(original), outputs_of(original)
    if backend is None or outputs is None:
        return None
    return Kind(backend, outputs, "temporal_patch_size" in inspect.signature(original._preprocess).parameters)


def outputs_of(original: Any) -> tuple[str, str] | None:
    named = tuple(getattr(original, "model_input_names", ()))
    return next((outputs for outputs in _OUTPUTS if named[:2] == outputs), None)


def backend_of(original: Any) -> Backend | None:
    from transformers import image_processing_backends as backends

    for name, base, resizing in (
        ("torchvision", backends.TorchvisionBackend, TORCH),
        ("pil", backends.PilBackend, PILLOW),
    ):
        if base in original.__mro__:
            return Backend(name, base, resizing)
    return None
