"""`python -m fusedvit.runtime.compile_program`: `compile_worker` without PyTorch.

Importing PyTorch takes 1.5 s, and 3 to 6 where Python keeps no byte code, as in many containers: longer than most
kernels take to compile. Compiling needs nothing of PyTorch. Modules of kernels use it in annotations and in tables of
dtypes, where stand-ins that only have names suffice. If an import needs more than names, the worker imports PyTorch.
"""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

WORKER = "fusedvit.runtime.compile_worker"


class Name:
    """Stands for an attribute of PyTorch, one object for each name. Triton identifies dtypes by their text."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __getattr__(self, name: str) -> "Name":
        return _named(self, self._name, name)

    def __or__(self, other: object) -> "Name":  # `torch.Tensor | None`
        return self

    __ror__ = __or__

    def __call__(self, *given: object, **named: object) -> "Name":
        return self


class Names(ModuleType):
    """Stands for the module `torch`."""

    def __getattr__(self, name: str) -> Name:
        return _named(self, self.__name__, name)


def _named(holder: object, prefix: str, name: str) -> Name:
    if name.startswith("__"):
        raise AttributeError(name)
    found = Name(f"{prefix}.{name}")
    setattr(holder, name, found)
    return found


def worker() -> Any:
    """The module of the worker, imported without PyTorch.

    Raises:
        Exception: an import needs more of PyTorch than names.
    """
    sys.modules.setdefault("torch", Names("torch"))
    return importlib.import_module(WORKER)


def main() -> None:
    """The program."""
    try:
        found = worker()
    except Exception:  # another version of Triton, or a backend of somebody's
        os.execv(sys.executable, [sys.executable, "-m", WORKER, *sys.argv[1:]])
    found.main()


if __name__ == "__main__":
    main()
