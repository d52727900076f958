"""Subclasses of Hugging Face's image and video processors that return bytes, and one call of such a processor.

The processor's own code decides sizes, grids and the order of a video's frames; it runs on images that have a shape and
no pixels. Calls whose arguments need more run the backend's own code on the CPU, or the original code.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange

from fusedvit.kernels.patches import PatchLayout
from fusedvit.pixels.arguments import device_named
from fusedvit.pixels.byte_pixels import BytePixels
from fusedvit.pixels.patches import SizedFrames, patches_of
from fusedvit.pixels.pipeline import Pipeline, as_checked, is_plain
from fusedvit.pixels.processor_kinds import Backend, Kind, kind_of

STATE = "_fusedvit"  # in a swapped processor's __dict__
ORIGINAL = "_fusedvit_original"  # of a swapped class
CHANNELS_LAST = "channels_last"  # as transformers calls the layout of decoded images
_BICUBIC = 3  # of Pillow and transformers


@dataclass(frozen=True)
class Home:
    """Where a swapped processor computes if a call does not name a device."""

    device: torch.device | None  # None: the current GPU if there is one
    process: int
    ours: bool = True  # on a GPU our kernels run; else the backend's code on the CPU, whatever the device
    checking: bool = False  # on a CPU the reference of our kernels runs

    def resolve(self, asked: Any) -> torch.device:
        """The device to compute on: the CPU in DataLoader workers and in any process but the one that swapped.

        Raises ValueError or TypeError where torch has no such device.
        """
        if asked is not None:
            device = device_named(asked)
        elif os.getpid() != self.process or torch.utils.data.get_worker_info() is not None:
            device = torch.device("cpu")
        elif self.device is None:
            device = torch.device("cuda" if _has_gpu() else "cpu")
        else:
            device = self.device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device

    def runs_ours(self, asked: Any) -> bool:
        """Whether our kernels, or their reference, will run."""
        return self.ours and (self.checking or self.resolve(asked).type == "cuda")


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


class Decision(NamedTuple):
    """A processor's decision for an image's shape: the grid (t, h, w) in patches, and the size to resize to; None where
    other code than the backend's `resize` has changed the size."""

    grid: tuple[int, int, int]
    size: tuple[int, int] | None


class Classes(NamedTuple):
    """Subclasses of a processor's class. swapped: the class that `swap` assigns; sizes: decides sizes without resizing;
    host: resizes with the backend's own code and cuts bytes into patches."""

    original: Any
    swapped: Any
    sizes: Any
    host: Any
    kind: Kind


@functools.cache
def classes_of(original: Any) -> Classes:
    kind = kind_of(original)
    assert kind is not None, "only supported processors are swapped"
    named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    cut = kind.still and not kind.padded
    sizes, host = _sizes_class(original, kind.backend, cut), _host_class(original, cut)
    swapped = type(original.__name__, (original,), named | {ORIGINAL: original})
    classes = Classes(original, swapped, sizes, host, kind)
    for name, value in _methods(classes).items():
        setattr(swapped, name, value)
    return classes


def _sizes_class(original: Any, backend: Backend, still: bool) -> Any:
    """`original` for images without pixels; its `resized` is the size that `original` decides on."""

    def resize(self: Any, image: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        self.resized = size.height, size.width
        shape = (*image.shape[:-2], *self.resized)
        return _shape_alone(shape) if isinstance(image, np.ndarray) else image.new_empty(shape)

    def patchify(self: Any, image: Any = None, patch_size: int = 1, images: Any = None, **kwargs: Any) -> Any:
        image = image if images is None else images
        h, w = (side // patch_size for side in image.shape[-2:])
        shape = (*image.shape[:-3], h * w, 0)
        return np.empty(shape) if isinstance(image, np.ndarray) else image.new_empty(shape), h, w

    # between `original`, which decides, and the backend's class, which resizes
    resizer = type("Sizes", (backend.base,), {"resize": resize})
    return type(original.__name__, (original, resizer), {"patchify": patchify} if still else {})


def _shape_alone(shape: Sequence[int]) -> np.ndarray:
    return np.broadcast_to(np.uint8(0), tuple(shape))


def _host_class(original: Any, still: bool) -> Any:
    """`original`, except that it cuts stills into patches of one frame, of any dtype."""

    def patchify(self: Any, images: Any, patch_size: int, merge_size: int, **kwargs: Any) -> Any:
        merge, patch = int(merge_size), int(patch_size)  # einops' cache takes 1 and 1.0 for one key
        sides = {"mh": merge, "mw": merge, "ph": patch, "pw": patch}
        h, w = (side // patch_size for side in images.shape[-2:])
        return rearrange(images, "... c (h mh ph) (w mw pw) -> ... (h w mh mw) (c ph pw)", **sides), h, w

    def image_patchify(self: Any, image: Any = None, images: Any = None, **kwargs: Any) -> Any:
        given = image if images is None else images
        if any(side % (kwargs["patch_size"] * kwargs["merge_size"]) for side in given.shape[-2:]):
            return original.patchify(self, given, **kwargs)  # raises the error for this size
        return patchify(self, given, **kwargs)

    return type(original.__name__, (original,), {"patchify": image_patchify} if still else {})


def _methods(classes: Classes) -> dict[str, Any]:
    """The methods that a swapped class overrides."""
    original = classes.original

    def preprocess(self: Any, images: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("videos", images) if not classes.kind.still else images
        home = self.__dict__.get(STATE)
        asked = given.device if isinstance(given, _Videos) else kwargs.get("device")
        if home is not None and not args and is_plain(self, original):
            found = _bytes_of(classes, self, given, kwargs, home, asked)
            if found is not None:
                return found
        if home is not None and classes.kind.backend.name == "torchvision":  # as torchvision's own intake would
            given = [image.contiguous() if asked is None else image.contiguous().to(asked) for image in given]
        return original._preprocess(self, given, *args, **kwargs)

    def to_dict(self: Any) -> Any:
        saved = original.to_dict(self)
        saved.pop(STATE, None)
        return saved

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is not classes.swapped:  # a user's subclass
            return original.__reduce_ex__(self, protocol)
        return _rebuild, (original,), self.__dict__.copy()

    return {"_preprocess": preprocess, "to_dict": to_dict, "__reduce_ex__": reduce} | _intake(classes)


def _intake(classes: Classes) -> dict[str, Any]:
    """Intake methods that leave images as they lie in memory where our kernels will read them: the CPU neither moves
    nor transposes them. They replace the backend's own methods only, never those of a model's processor.
    """
    original = classes.original
    on_pil = classes.kind.backend.name == "pil"
    of_base = not classes.kind.still and original._prepare_input_videos is _base_of_videos()._prepare_input_videos

    def process_image(self: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
        home = self.__dict__.get(STATE)
        device = None if on_pil else kwargs.get("device")  # Pillow's original code reads no device
        if home is None or args or not is_plain(self, original) or not home.runs_ours(device):
            return original.process_image(self, image, *args, **kwargs)
        seen = _rgb(image, kwargs.get("input_data_format"), 3)
        if seen is None:
            return original.process_image(self, image, **kwargs | {"device": None})
        return seen if on_pil else _tensor(seen)

    def prepare_input_videos(self: Any, videos: Any, *args: Any, **kwargs: Any) -> Any:
        home, device = self.__dict__.get(STATE), kwargs.get("device")
        if home is None or args or not is_plain(self, original):
            return original._prepare_input_videos(self, videos, *args, **kwargs)
        if not (of_base and home.runs_ours(device)):
            return _Videos(original._prepare_input_videos(self, videos, **kwargs), device)
        seen = [_rgb(video, kwargs.get("input_data_format"), 4) for video in videos]
        if any(video is None for video in seen):
            prepared = original._prepare_input_videos(self, videos, **kwargs | {"device": None})
        else:
            prepared = [_tensor(video) for video in seen if video is not None]
        return _Videos(prepared, device)

    methods: dict[str, Any] = {}
    if original.process_image is classes.kind.backend.base.process_image:
        methods["process_image"] = process_image
    if not classes.kind.still:
        methods["_prepare_input_videos"] = prepare_input_videos
    return methods


def _base_of_videos() -> Any:
    from transformers.video_processing_utils import BaseVideoProcessor

    return BaseVideoProcessor


def _rebuild(original: Any) -> Any:
    """An empty swapped processor, which copy and pickle fill."""
    return object.__new__(classes_of(original).swapped)


class _Videos(list[torch.Tensor]):
    """Prepared videos with the call's device (or None), which the original code does not pass on."""

    def __init__(self, videos: Any, device: Any) -> None:
        super().__init__(videos)
        self.device = device


def _rgb(image: Any, layout: Any, axes: int) -> np.ndarray | None:
    """A view with the channels before the height, if every transformers takes `image` for 8-bit RGB with channels last.

    axes: 3 for an image, 4 for a video. Anything else gives None and goes to the original code.
    """
    if layout not in (None, CHANNELS_LAST):
        return None
    if getattr(image, "mode", None) == "RGB" and "transparency" not in image.info:
        image = np.array(image)
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != axes or image.shape[-1] != 3:
        return None
    if layout is None and image.shape[-3] in (1, 3, 4):  # the original code would take rows for channels
        return None
    return image.transpose(*range(image.ndim - 3), -1, -3, -2)  # in a tenth of moveaxis' time


def _tensor(image: np.ndarray) -> torch.Tensor:
    """The array as a tensor. Memory is shared only if it is writable, as torch demands."""
    return torch.from_numpy(image if image.flags.writeable else image.copy())


# ── one call ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _bytes_of(classes: Classes, part: Any, images: Any, kwargs: dict[str, Any], home: Home, asked: Any) -> Any:
    """The call's outputs with bytes, on the device `asked` for; None where the original code must run."""
    normalization = classes.kind.normalization(kwargs)
    if normalization is None or not images:
        return None
    axes = 3 if classes.kind.still else 4
    if not all(_is_bytes(image, axes, normalization.channels) for image in images):
        return None
    device = home.resolve(asked)
    plain = kwargs | {"do_rescale": False, "do_normalize": False}
    outputs = None
    if home.runs_ours(device):
        outputs = _on_device(classes, part, images, plain, device)
    if outputs is None:
        outputs = classes.host._preprocess(as_class(classes.host, part), list(images), **plain)
    pixels, _ = classes.kind.outputs
    outputs[pixels] = BytePixels.mark(outputs[pixels].to(device), normalization, classes.kind.still)
    return outputs


def _is_bytes(image: Any, axes: int, channels: int) -> bool:
    byte = torch.uint8 if isinstance(image, torch.Tensor) else np.uint8
    return image.dtype == byte and image.ndim == axes and image.shape[-3] == channels


@functools.cache
def _bicubic() -> tuple[Any, ...]:
    """The values of `resample` that mean a bicubic filter."""
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():
        return (_BICUBIC,)
    from torchvision.transforms.v2.functional import InterpolationMode

    return (_BICUBIC, InterpolationMode.BICUBIC)


def as_class(cls: Any, part: Any) -> Any:
    """A shallow copy of `part`, of another class."""
    other = object.__new__(cls)
    other.__dict__.update(part.__dict__)
    return other


def _on_device(classes: Classes, part: Any, images: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    """The outputs, computed by our kernels; None where the kernels cannot do what is asked for."""
    from transformers import BatchFeature

    if not kwargs.get("do_resize") or kwargs.get("resample") not in _bicubic():
        return None
    decided: dict[tuple[int, ...], Decision] = {}
    sources = []
    for image in images:
        shape = tuple(image.shape)
        if shape not in decided:
            decided[shape] = _decide(classes, part, shape, kwargs)
        grid, size = decided[shape]
        if size is None:
            return None
        if isinstance(image, np.ndarray):
            image = _tensor(image if min(image.strides) >= 0 else image.copy())  # torch takes no negative strides
        frames = image.movedim(-3, -1)
        sources.append(SizedFrames(frames[None] if classes.kind.still else frames, grid, size))
    temporal = 1 if classes.kind.still else classes.kind.frames(kwargs)
    layout = PatchLayout(int(kwargs["patch_size"]), int(kwargs["merge_size"]), int(temporal))
    pixels, grid_name = classes.kind.outputs
    rows = patches_of(sources, layout, classes.kind.backend.resizing, device)
    return BatchFeature({pixels: rows, grid_name: torch.tensor([source.grid for source in sources])})


def _decide(classes: Classes, part: Any, shape: tuple[int, ...], kwargs: dict[str, Any]) -> Decision:
    """The decision of the processor's own code, on an image of this shape without pixels."""
    if classes.kind.still:  # an image processor's code reads only its arguments, so the decision is cached
        try:
            return _decide_still(classes, as_checked(classes.original), shape, tuple(kwargs.items()))
        except TypeError:  # an argument that cannot be a key
            pass
    return _decided(classes, part.__dict__, shape, kwargs)


@functools.lru_cache(maxsize=4096)
def _decide_still(
    classes: Classes, pipeline: Pipeline, shape: tuple[int, ...], arguments: tuple[tuple[str, Any], ...]
) -> Decision:
    return _decided(classes, dict(arguments), shape, dict(arguments))


def _decided(classes: Classes, attributes: dict[str, Any], shape: tuple[int, ...], kwargs: dict[str, Any]) -> Decision:
    sizes = object.__new__(classes.sizes)
    sizes.__dict__.update(attributes)
    sizes.resized = None
    on_pil = classes.kind.backend.name == "pil"
    image = _shape_alone(shape) if on_pil else torch.empty(shape, dtype=torch.uint8, device="meta")
    found = sizes._preprocess([image], **kwargs | {"return_tensors": None})
    t, h, w = (int(n) for n in found[classes.kind.outputs[1]][0])
    room = h * kwargs["patch_size"], w * kwargs["patch_size"]
    # ints, whatever the arguments were: the cache shares this with equal arguments of other types
    size = (int(sizes.resized[0]), int(sizes.resized[1])) if sizes.resized else (shape[-2], shape[-1])
    fits = size == room if sizes.resized is None else all(n <= most for n, most in zip(size, room, strict=True))
    return Decision((t, h, w), size if fits else None)
