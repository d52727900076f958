"""A compiled kernel launched again: directly, or through Triton's launcher if there are launch hooks."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from triton import knobs

from fusedvit.kernels.launch import Loaded


class Kernel:
    """Notes what reaches the driver, and what goes through Triton's own launcher."""

    def __init__(self) -> None:
        self.function, self.packed_metadata = "function", "metadata"
        self.run_with: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.run_with.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, **named: self.launched.append((grid, *arguments, *named.items()))


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_goes_to_the_current_stream_of_the_current_device(kernel: Kernel) -> None:
    loaded = Loaded(kernel, {"A": 1, "B": True})
    now = SimpleNamespace(device=0)
    with (
        mock.patch.object(torch._C, "_cuda_getDevice", lambda: now.device, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x7000 + index, create=True),
    ):
        for now.device in (0, 1):
            loaded.launch(5, (0x100, 7))
    hooks = None, None, None
    assert kernel.run_with == [
        (5, 1, 1, 0x7000 + device, "function", "metadata", *hooks, 0x100, 7, 1, True) for device in (0, 1)
    ]
    assert kernel.launched == []


def test_goes_to_a_stream_that_is_named(kernel: Kernel) -> None:
    loaded, stream = Loaded(kernel, {"A": 1}), SimpleNamespace(cuda_stream=0x9000)
    loaded.launch(5, (0x100,), stream)  # type: ignore[arg-type]
    assert kernel.run_with == [(5, 1, 1, 0x9000, "function", "metadata", None, None, None, 0x100, 1)]
    with mock.patch.object(knobs.runtime, "launch_enter_hook", print):
        loaded.launch(6, (0x100,), stream)  # type: ignore[arg-type]
    assert kernel.launched == [((6, 1, 1), 0x100, 1, ("stream", 0x9000))]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks_see_every_launch(kernel: Kernel, name: str) -> None:
    loaded, chain = Loaded(kernel, {"A": 1}), getattr(knobs.runtime, name)
    chain.add(print)
    try:
        loaded.launch(5, (0x100,))
    finally:
        chain.remove(print)
    with mock.patch.object(knobs.runtime, name, print):  # as older versions take it
        loaded.launch(6, (0x100,))
    assert kernel.launched == [((5, 1, 1), 0x100, 1), ((6, 1, 1), 0x100, 1)] and kernel.run_with == []
