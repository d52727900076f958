"""Every operation has a reference of the same name and signature, so that the encoder runs on either set."""

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from fusedvit import kernels

FOLDER = Path(kernels.__path__[0])
FILES = sorted(path.stem for path in (FOLDER / "reference").glob("*.py"))
OPERATIONS = {
    "attention", "fingerprint", "gather_rows", "head_norm_rope", "layer_norm", "linear", "load_inputs", "store_outputs",
    "vision_metadata",
}  # fmt: skip


def functions(module: ModuleType) -> dict[str, inspect.Signature]:
    """Signatures of the public functions that a module defines itself."""
    found = inspect.getmembers(module, inspect.isfunction)
    return {n: inspect.signature(f) for n, f in found if f.__module__ == module.__name__ and not n.startswith("_")}


@pytest.mark.parametrize("file", FILES)
def test_references_have_the_signatures_of_their_operations(file: str) -> None:
    operations = functions(importlib.import_module(f"fusedvit.kernels.{file}"))
    references = functions(importlib.import_module(f"fusedvit.kernels.reference.{file}"))
    for name in set(operations) & set(references):
        assert list(operations[name].parameters.values()) == list(references[name].parameters.values()), name


def test_no_operation_is_without_a_reference() -> None:
    for package in ("fusedvit.kernels", "fusedvit.kernels.reference"):
        found = [functions(importlib.import_module(f"{package}.{file}")) for file in FILES]
        assert {name for names in found for name in names} >= OPERATIONS, package
