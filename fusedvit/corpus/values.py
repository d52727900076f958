"""Values of a batch's columns as sources of pixels, and as Pillow images."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np

from fusedvit.pixels.media import SOURCES, Limits, MediaError, Source, load_one, raise_of_machine, rgb_of


def as_many(sources: Iterable[Source], names: int) -> Iterator[Source]:
    """The sources; raises ValueError where they are not as many as names, at once where their number is known."""
    expected = f"fusedvit: embed: a name of each source expected, got {names} names and"
    if isinstance(sources, Sized) and len(sources) != names:
        raise ValueError(f"{expected} {len(sources)} sources")
    count = 0
    for source in sources:
        if count == names:
            raise ValueError(f"{expected} more sources")
        yield source
        count += 1
    if count != names:
        raise ValueError(f"{expected} {count} sources")


def is_one_row(values: Any) -> bool:
    """Whether a column holds one image instead of a list of them: a path, a file's bytes, a picture or its pixels."""
    if isinstance(values, np.ndarray):
        return values.ndim == 0 or (values.ndim == 3 and values.shape[-1] == 3)
    one = (str, os.PathLike, bytes, bytearray, memoryview, Mapping)
    return isinstance(values, one) or hasattr(values, "as_py") or hasattr(values, "convert")


def source_of(value: Any) -> Source:
    """A row's value as a source of pixels; an error where it is none."""
    if hasattr(value, "as_py"):  # of Arrow
        value = value.as_py()
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, np.generic):
        value = value.item()
    if hasattr(value, "convert"):  # a Pillow image, as `datasets` decodes them
        try:
            return rgb_of(value)
        except Exception as error:  # a file that is read only now, and damaged
            raise_of_machine(error, "an image")
            return MediaError(f"an image that does not decode ({type(error).__name__})")
    if isinstance(value, SOURCES):
        return value
    return MediaError(f"a path, a file's bytes, an image or pixels expected, got {type(value).__name__}")


def image_of(source: Source, limits: Limits | None, index: int) -> Any:
    """A Pillow image, or what is wrong with the source."""
    from PIL import Image

    try:
        media = load_one(source, 1, limits, index)
    except MediaError as error:
        return error
    if media.kind == "video":
        return MediaError(f"{media.name}: a video, and encode= takes images", index)
    return Image.fromarray(media.frames[0])
