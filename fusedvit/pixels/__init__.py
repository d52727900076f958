"""From files to patches as bytes: `load`, `stream`, and Hugging Face's processors changed in place (`swap`).

Importing this package imports neither torch nor transformers: the names are loaded when first used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusedvit.errors import InputError
    from fusedvit.model.normalization import Normalization
    from fusedvit.pixels.byte_pixels import BytePixels
    from fusedvit.pixels.media import Limits, Media, MediaError, MediaTooLarge, VideoFacts, load
    from fusedvit.pixels.processors import restore, swap
    from fusedvit.pixels.streaming import Batch, stream

__all__ = [
    "Batch",
    "BytePixels",
    "InputError",
    "Limits",
    "Media",
    "MediaError",
    "MediaTooLarge",
    "Normalization",
    "VideoFacts",
    "load",
    "restore",
    "stream",
    "swap",
]

_HOMES = {
    **dict.fromkeys(("Limits", "Media", "MediaError", "MediaTooLarge", "VideoFacts", "load"), "pixels.media"),
    **dict.fromkeys(("restore", "swap"), "pixels.processors"),
    **dict.fromkeys(("Batch", "stream"), "pixels.streaming"),
    "BytePixels": "pixels.byte_pixels",
    "InputError": "errors",
    "Normalization": "model.normalization",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fusedvit.pixels' has no attribute {name!r}")
    value = getattr(_import_module(f"fusedvit.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
