"""fusedvit: fused Triton kernels for the vision towers of Hugging Face models.

Importing this package imports neither torch, triton nor transformers: the public names are loaded when first used.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING
from zipimport import zipimporter as _zipimporter

if TYPE_CHECKING:
    from fusedvit import pixels
    from fusedvit.api import fuse, fuse_tower, unfuse
    from fusedvit.config import FuseConfig
    from fusedvit.corpus.embedder import Embedder
    from fusedvit.data_parallel import DataParallelEncoder
    from fusedvit.errors import UnsupportedModel
    from fusedvit.fused_encoder import FusedEncoder
    from fusedvit.model.spec import VisionSpec

__version__ = "0.2.0"  # pyproject.toml reads it from here
__all__ = [
    "DataParallelEncoder",
    "Embedder",
    "FuseConfig",
    "FusedEncoder",
    "UnsupportedModel",
    "VisionSpec",
    "__version__",
    "fuse",
    "fuse_tower",
    "pixels",
    "unfuse",
]

_HOMES = {
    "DataParallelEncoder": "fusedvit.data_parallel",
    "Embedder": "fusedvit.corpus.embedder",
    "FuseConfig": "fusedvit.config",
    "FusedEncoder": "fusedvit.fused_encoder",
    "UnsupportedModel": "fusedvit.errors",
    "VisionSpec": "fusedvit.model.spec",
    "fuse": "fusedvit.api",
    "fuse_tower": "fusedvit.api",
    "unfuse": "fusedvit.api",
}


def _is_our_checkout(root: _Path) -> bool:
    """Whether `root` holds this project's sources. For site-packages the answer must be no: `root / "kernels"` would be
    another project's package there, and `fusedvit.kernels` would silently import it."""
    project = root / "pyproject.toml"
    return project.is_file() and 'name = "fusedvit"' in project.read_text(encoding="utf-8").splitlines()


_root = _Path(__file__).resolve().parent.parent
if _is_our_checkout(_root):
    __path__.append(str(_root))  # kernels/, graphs/ and bench/ stand next to the package in a checkout
if __spec__ is not None and isinstance(__spec__.loader, _zipimporter):
    _import_module("fusedvit.archives").find_folders()


def __getattr__(name: str) -> object:
    if name == "pixels":
        return _import_module("fusedvit.pixels")
    if name not in _HOMES:
        raise AttributeError(f"module 'fusedvit' has no attribute {name!r}")
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
