"""Hugging Face's image and video processors, changed in place so that they give bytes (`BytePixels`).

Only what follows the decision about sizes is replaced. A processor keeps its class's name, its attributes and what it
saves; calls, sizes, grids and text are as before. Where an argument asks for something else than the processor's plain
rescaling and normalisation of 8-bit RGB, its original code runs for that call and gives floats.
"""

import copy
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange

from fusedvit.errors import UnsupportedModel
from fusedvit.kernels.patches import PatchLayout
from fusedvit.model.normalization import Normalization
from fusedvit.pixels.byte_pixels import BytePixels
from fusedvit.pixels.patches import Source, patches_of
from fusedvit.pixels.resize import PILLOW, TORCH, Resizing

_STATE = "_fusedvit"  # in a swapped processor's __dict__
_ORIGINAL = "_fusedvit_original"  # of a swapped class
_PARTS = ("image_processor", "video_processor")
_OUTPUTS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
_BICUBIC = 3  # of Pillow and transformers


@dataclass(frozen=True)
class _Home:
    """Where a swapped processor computes when a call does not say."""

    device: torch.device | None  # None: the current GPU if there is one
    process: int

    def resolve(self, asked: Any) -> torch.device:
        """In another process than the one that swapped, which may be a fork, and in a DataLoader's workers: the CPU."""
        if asked is not None:
            return torch.device(asked)
        if os.getpid() != self.process or torch.utils.data.get_worker_info() is not None:
            return torch.device("cpu")
        if self.device is None:
            return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        return self.device


class _Backend(NamedTuple):
    """name: as `Normalization` has it; base: transformers' class; resizing: what it computes on a CPU."""

    name: str
    base: type
    resizing: Resizing


class _Classes(NamedTuple):
    """Subclasses of a processor's class. swapped: what it becomes; sizes: decides and resizes nothing; host: resizes
    with the backend's own code and cuts bytes into patches."""

    original: Any
    swapped: Any
    sizes: Any
    host: Any
    backend: _Backend
    outputs: tuple[str, str]

    @property
    def still(self) -> bool:
        return self.outputs == _OUTPUTS[0]


def swap(processor: Any, device: torch.device | str | None = None) -> Any:
    """Makes the image and video processors in `processor` give bytes, in place.

    Args:
        processor: one of Hugging Face's processors, or an image or video processor itself.
        device: where patches are computed when a call's `device=` does not say; None for the current GPU, if there is
            one. In DataLoader workers and other processes the CPU.

    Returns:
        `processor`.

    Raises:
        UnsupportedModel: it holds neither an image nor a video processor whose patches we can compute.
    """
    home = _Home(None if device is None else torch.device(device), os.getpid())
    reasons = []
    for name, part in _parts_of(processor).items():
        original = _original_of(part)
        reason = _why_unsupported(part, original)
        if reason:
            reasons.append(f"{name} ({original.__name__}) {reason}")
            continue
        part.__class__ = _classes_of(original).swapped
        part.__dict__[_STATE] = home
    if len(reasons) == len(_parts_of(processor)):
        raise UnsupportedModel(
            f"fusedvit: {type(processor).__name__} cannot give bytes: {'; '.join(reasons) or 'no image processor in it'}"
        )
    return processor


def restore(processor: Any) -> Any:
    """Gives the processors in `processor` their own classes back; returns `processor`."""
    for part in _parts_of(processor).values():
        part.__class__ = _original_of(part)
        part.__dict__.pop(_STATE, None)
    return processor


def _parts_of(processor: Any) -> dict[str, Any]:
    found = {name: getattr(processor, name, None) for name in _PARTS}
    parts = {name: part for name, part in found.items() if part is not None}
    return parts or {"it": processor}


def _original_of(part: Any) -> Any:
    return type(part).__dict__.get(_ORIGINAL, type(part))


# ── what is supported ─────────────────────────────────────────────────────────────────────────────────────────────────


def _why_unsupported(part: Any, original: Any) -> str:
    """Why `part` is left alone; "" if our patches are the original's, which two small inputs show."""
    if _backend_of(original) is None:
        return "is of no backend that we know"
    if getattr(original, "patchify", None) is None or _outputs_of(original) is None:
        return "does not cut images into patches with a grid"
    plain = copy.copy(part)
    plain.__class__ = original
    plain.__dict__.pop(_STATE, None)
    return "" if all(_agrees(plain, *size) for size in ((61, 97), (150, 40))) else "lays patches out in another way"


def _agrees(plain: Any, height: int, width: int) -> bool:
    classes = _classes_of(type(plain))
    frames = np.random.default_rng(0).integers(0, 256, (1 if classes.still else 3, height, width, 3), dtype=np.uint8)
    asked = {"return_tensors": "pt", "do_resize": True, "do_rescale": True, "do_normalize": True, "device": "cpu"}
    if classes.still:
        wanted = plain(images=[frames[0]], **asked)
    else:
        wanted = plain(videos=[frames], do_sample_frames=False, **asked)
    swapped = copy.copy(plain)
    swapped.__class__ = classes.swapped
    swapped.__dict__[_STATE] = _Reference(None, 0)
    got = swapped(**({"images": [frames[0]]} if classes.still else {"videos": [frames], "do_sample_frames": False}), **asked)
    pixels, grid = classes.outputs
    return (
        isinstance(got[pixels], BytePixels)
        and torch.equal(got[pixels].pixels(), wanted[pixels])
        and torch.equal(got[grid], wanted[grid])
    )


class _Reference(_Home):
    """Where the reference of the kernels runs, on the CPU."""


def _outputs_of(original: Any) -> tuple[str, str] | None:
    named = tuple(getattr(original, "model_input_names", ()))
    return next((outputs for outputs in _OUTPUTS if named[:2] == outputs), None)


def _backend_of(original: Any) -> _Backend | None:
    from transformers import image_processing_backends as backends

    for name, base, resizing in (
        ("torchvision", backends.TorchvisionBackend, TORCH),
        ("pil", backends.PilBackend, PILLOW),
    ):
        if base in original.__mro__:
            return _Backend(name, base, resizing)
    return None


# ── subclasses ────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _classes_of(original: Any) -> _Classes:
    backend, outputs = _backend_of(original), _outputs_of(original)
    assert backend is not None and outputs is not None, "only supported processors are swapped"
    named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    sizes, host = _sizes_class(original, backend), _host_class(original, outputs == _OUTPUTS[0])
    swapped = type(original.__name__, (original,), named | {_ORIGINAL: original})
    classes = _Classes(original, swapped, sizes, host, backend, outputs)
    for name, value in _methods(classes).items():
        setattr(swapped, name, value)
    return classes


def _sizes_class(original: Any, backend: _Backend) -> Any:
    """`original` on images that have a shape alone; `resized` is the size that it decides on."""

    def resize(self: Any, image: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        self.resized = size.height, size.width
        shape = (*image.shape[:-2], *self.resized)
        return _shape_alone(shape) if isinstance(image, np.ndarray) else image.new_empty(shape)

    def patchify(self: Any, image: Any, patch_size: int, **kwargs: Any) -> Any:
        h, w = (side // patch_size for side in image.shape[-2:])
        return np.empty((h * w, 0)), h, w

    # between `original`, which decides, and the backend's class, which resizes
    resizer = type("Sizes", (backend.base,), {"resize": resize})
    body = {"patchify": patchify} if backend.name == "pil" else {}
    return type(original.__name__, (original, resizer), body)


def _shape_alone(shape: Sequence[int]) -> np.ndarray:
    return np.broadcast_to(np.uint8(0), tuple(shape))


def _host_class(original: Any, still: bool) -> Any:
    """`original`, but for stills cut into patches of one frame, whatever the dtype."""

    def patchify(self: Any, images: Any, patch_size: int, merge_size: int, **kwargs: Any) -> Any:
        sides = {"mh": merge_size, "mw": merge_size, "ph": patch_size, "pw": patch_size}
        h, w = (side // patch_size for side in images.shape[-2:])
        return rearrange(images, "... c (h mh ph) (w mw pw) -> ... (h w mh mw) (c ph pw)", **sides), h, w

    def image_patchify(self: Any, image: Any = None, images: Any = None, **kwargs: Any) -> Any:
        return patchify(self, image if images is None else images, **kwargs)

    return type(original.__name__, (original,), {"patchify": image_patchify} if still else {})


def _methods(classes: _Classes) -> dict[str, Any]:
    original = classes.original

    def process_image(self: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
        home = self.__dict__.get(_STATE)
        if home is None or args or home.resolve(kwargs.get("device")).type == "cpu":
            return original.process_image(self, image, *args, **kwargs)
        seen = _rgb(image, kwargs.get("input_data_format"))
        if seen is None:
            return original.process_image(self, image, **kwargs | {"device": None})
        return seen if classes.backend.name == "pil" else torch.from_numpy(seen)

    def prepare_input_videos(self: Any, videos: Any, *args: Any, **kwargs: Any) -> Any:
        home = self.__dict__.get(_STATE)
        device = kwargs.get("device")
        if home is None or args or home.resolve(device).type == "cpu":
            return original._prepare_input_videos(self, videos, *args, **kwargs)
        seen = [_rgb(video, kwargs.get("input_data_format")) for video in videos]
        if any(video is None for video in seen):
            prepared = original._prepare_input_videos(self, videos, **kwargs | {"device": None})
        else:
            prepared = [torch.from_numpy(video) for video in seen]
        return _Videos(prepared, device)

    def preprocess(self: Any, images: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("videos", images) if not classes.still else images
        home = self.__dict__.get(_STATE)
        asked = given.device if isinstance(given, _Videos) else kwargs.get("device")
        if home is not None and not args:
            found = _bytes_of(classes, self, given, kwargs, home, home.resolve(asked))
            if found is not None:
                return found
        if home is not None and asked is not None and classes.backend.name == "torchvision":
            given = [image.contiguous().to(asked) for image in given]
        return original._preprocess(self, given, *args, **kwargs)

    def to_dict(self: Any) -> Any:
        saved = original.to_dict(self)
        saved.pop(_STATE, None)
        return saved

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is not classes.swapped:  # somebody's subclass
            return original.__reduce_ex__(self, protocol)
        return _rebuild, (original,), self.__dict__.copy()

    shared = {"_preprocess": preprocess, "to_dict": to_dict, "__reduce_ex__": reduce}
    own = {"process_image": process_image} if classes.still else {"_prepare_input_videos": prepare_input_videos}
    return shared | own


def _rebuild(original: Any) -> Any:
    """An empty swapped processor, for copy and pickle to fill."""
    return object.__new__(_classes_of(original).swapped)


class _Videos(list[torch.Tensor]):
    """Prepared videos, and the device that the call asked for, which the original code does not pass on."""

    def __init__(self, videos: Any, device: Any) -> None:
        super().__init__(videos)
        self.device = device


def _rgb(image: Any, layout: Any) -> np.ndarray | None:
    """A view with the channels before the height, of what every version takes for 8-bit RGB with channels last."""
    if layout is not None:
        return None
    if getattr(image, "mode", None) == "RGB":
        image = np.array(image)
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim not in (3, 4):
        return None
    first = image.shape[-3]
    if image.shape[-1] != 3 or first in (1, 3, 4) or (image.ndim == 4 and image.shape[1] in (1, 3, 4)):
        return None
    return np.moveaxis(image if image.flags.writeable else image.copy(), -1, -3)


# ── one call ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _bytes_of(
    classes: _Classes, part: Any, images: Any, kwargs: dict[str, Any], home: _Home, device: torch.device
) -> Any:
    """The call's outputs with bytes; None where the original code must run."""
    normalization = _normalization_of(classes, kwargs)
    if normalization is None or not all(_is_bytes(image, normalization.channels) for image in images):
        return None
    asked = kwargs | {"do_rescale": False, "do_normalize": False}
    ours = device.type == "cuda" or isinstance(home, _Reference)
    if ours and kwargs.get("do_resize") and kwargs.get("resample") in _bicubic():
        outputs = _on_device(classes, part, images, asked, device)
    else:
        outputs = classes.host._preprocess(_as(classes.host, part), images, **asked)
    pixels, _ = classes.outputs
    outputs[pixels] = BytePixels.mark(outputs[pixels].to(device), normalization, classes.still)
    return outputs


def _normalization_of(classes: _Classes, kwargs: dict[str, Any]) -> Normalization | None:
    """None where the call asks for something else than normalised torch tensors."""
    torch_asked = kwargs.get("return_tensors") == "pt" or (
        kwargs.get("return_tensors") is None and classes.backend.name == "torchvision"
    )
    if not (torch_asked and kwargs.get("do_rescale") and kwargs.get("do_normalize")):
        return None
    try:
        return Normalization(
            rescale_factor=kwargs["rescale_factor"],
            mean=kwargs["image_mean"],
            std=kwargs["image_std"],
            patch=kwargs["patch_size"],
            temporal_patch=kwargs["temporal_patch_size"] or 1,
            backend=classes.backend.name,
        )
    except (ValueError, TypeError):  # the original code says what is wrong with them
        return None


def _is_bytes(image: Any, channels: int) -> bool:
    return image.dtype in (np.uint8, torch.uint8) and image.shape[-3] == channels


@functools.cache
def _bicubic() -> tuple[Any, ...]:
    """What `resample` may be for a bicubic filter."""
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():
        return (_BICUBIC,)
    from torchvision.transforms.v2.functional import InterpolationMode

    return (_BICUBIC, InterpolationMode.BICUBIC)


def _as(cls: Any, part: Any) -> Any:
    """A shallow copy of `part`, of another class."""
    other = object.__new__(cls)
    other.__dict__.update(part.__dict__)
    return other


def _on_device(classes: _Classes, part: Any, images: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    from transformers import BatchFeature

    decided: dict[tuple[int, ...], tuple[tuple[int, int, int], tuple[int, int]]] = {}
    sources = []
    for image in images:
        shape = tuple(image.shape)
        if shape not in decided:
            decided[shape] = _decide(classes, part, shape, kwargs)
        grid, size = decided[shape]
        frames = torch.from_numpy(image) if isinstance(image, np.ndarray) else image
        frames = frames.movedim(-3, -1)
        sources.append(Source(frames[None] if classes.still else frames, grid, size))
    temporal = 1 if classes.still else kwargs["temporal_patch_size"]
    layout = PatchLayout(kwargs["patch_size"], kwargs["merge_size"], temporal)
    pixels, grid_name = classes.outputs
    rows = patches_of(sources, layout, classes.backend.resizing, device)
    return BatchFeature({pixels: rows, grid_name: torch.tensor([source.grid for source in sources])})


def _decide(
    classes: _Classes, part: Any, shape: tuple[int, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """(grid, size resized to), by the processor's own code on an image that has this shape and no pixels."""
    sizes = _as(classes.sizes, part)
    sizes.resized = shape[-2:]
    image = _shape_alone(shape) if classes.backend.name == "pil" else torch.empty(shape, dtype=torch.uint8, device="meta")
    found = sizes._preprocess([image], **kwargs | {"return_tensors": None})
    t, h, w = (int(n) for n in found[classes.outputs[1]][0])
    return (t, h, w), sizes.resized
