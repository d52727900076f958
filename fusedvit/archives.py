"""Finds the folders of this package in an archive on sys.path that lists no folders, as wheels are.

kernels/, graphs/ and bench/ have no __init__.py. Python takes such a folder of an archive for a package only if the
archive lists the folder itself; from 3.12.8 and 3.13.1 on it needs no help.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pkgutil import iter_modules


class Folders:
    """A finder of `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """The spec of a folder of ours that holds modules; None for what is none."""
        folders = [f"{folder}/{name.rpartition('.')[2]}" for folder in path or ()]
        if not name.startswith("fusedvit.") or next(iter_modules(folders), None) is None:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = folders
        return spec


def find_folders() -> None:
    """Has Python ask `Folders` about what it does not find itself, before it asks an editable installation."""
    after = sys.meta_path.index(PathFinder) + 1 if PathFinder in sys.meta_path else len(sys.meta_path)
    if Folders not in sys.meta_path:
        sys.meta_path.insert(after, Folders)
