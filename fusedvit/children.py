"""How this package starts child processes: the program that runs them, and where they find modules."""

import os
import sys
from multiprocessing import spawn

from fusedvit.errors import InputError


def interpreter() -> str:
    """The program that runs a module by `-m`.

    `sys.executable` may be an application instead: one that PyInstaller or cx_Freeze has made, or one that embeds
    Python, as uWSGI does. Started with `-m` it would do its own work again, and start itself again. It may name an
    interpreter by `multiprocessing.set_executable`; what embeds Python mostly embeds one that is installed.

    Raises:
        InputError: none is known.
    """
    own, named = sys.executable or "", os.fsdecode(spawn.get_executable() or "")
    installed = os.path.join(sys.exec_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    if getattr(sys, "frozen", False):
        known = [named] if named != own else []
    else:
        known = [own, named, *([installed] if os.access(installed, os.X_OK) else [])]
    for path in known:
        if "python" in os.path.basename(path).lower():
            return path
    raise InputError(
        f"sys.executable is {sys.executable!r}, and no Python interpreter: name one by multiprocessing.set_executable"
    )


def search_path() -> dict[str, str]:
    """Variables with which `python -m` searches the folders that this process searches.

    Otherwise it searches the working folder first, whose files may have names of modules (json.py), and none that a
    program added. Python 3.10 does not know the second variable.
    """
    return {"PYTHONPATH": os.pathsep.join(filter(None, map(absolute, sys.path))), "PYTHONSAFEPATH": "1"}


def absolute(folder: str) -> str:
    """The absolute path of a folder; "" for a relative one after the working folder was removed."""
    try:
        return os.path.abspath(folder)
    except FileNotFoundError:
        return ""
