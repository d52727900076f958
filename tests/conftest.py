"""What every test shares: the interpreter where there is no GPU, the `gpu` marker, the device."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# Triton reads this when a kernel is decorated, that is when fusedvit.kernels is imported: hence before any test is.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under Triton's interpreter."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on a Hopper GPU; the interpreter, which runs no Gluon, is not asked."""
    monkeypatch.setattr("fusedvit.kernels.hopper.gluon_compat.usable", lambda capability: capability == 90)
