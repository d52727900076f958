"""Where child processes that this package starts find modules: where this process finds them."""

import os
import sys


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
