"""A compiled kernel launched again: directly, or through Triton's launcher if there are launch hooks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from triton import knobs
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from fusedvit.kernels import launch, norms
from fusedvit.kernels.launch import Loaded, forget_damaged, is_cached, private_cache


class Launcher:
    """Notes what reaches the driver, and whether as a dependent launch."""

    def __init__(self) -> None:
        self.launch_pdl = False
        self.calls: list[tuple[Any, ...]] = []
        self.dependent: list[bool] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        self.dependent.append(self.launch_pdl)


class Kernel:
    """Of Triton's compiled kernel what a launch takes."""

    def __init__(self) -> None:
        self.function, self.packed_metadata, self.run = "function", "metadata", Launcher()

    def launch_metadata(self, grid: tuple[int, int, int], stream: int, *arguments: Any) -> tuple[Any, ...]:
        return grid, stream, *arguments


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
    assert kernel.run.calls == [
        (5, 1, 1, 0x7000 + device, "function", "metadata", None, None, None, 0x100, 7, 1, True) for device in (0, 1)
    ]


def test_goes_to_a_stream_that_is_named(kernel: Kernel) -> None:
    loaded, stream = Loaded(kernel, {"A": 1}), SimpleNamespace(cuda_stream=0x9000)
    loaded.launch(5, (0x100,), stream)  # type: ignore[arg-type]
    assert kernel.run.calls == [(5, 1, 1, 0x9000, "function", "metadata", None, None, None, 0x100, 1)]


def test_dependent_launches_share_a_kernel_with_others(kernel: Kernel) -> None:
    stream: Any = SimpleNamespace(cuda_stream=0x9000)
    for pdl in (False, True, False):
        Loaded(kernel, {"A": 1}, pdl).launch(5, (0x100,), stream)
    assert kernel.run.dependent == [False, True, False] and not kernel.run.launch_pdl


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks_see_every_launch(kernel: Kernel, name: str) -> None:
    loaded, chain, stream = Loaded(kernel, {"A": 1}), getattr(knobs.runtime, name), SimpleNamespace(cuda_stream=0x9000)
    hooks = {"launch_enter_hook": knobs.runtime.launch_enter_hook, "launch_exit_hook": knobs.runtime.launch_exit_hook}
    chain.add(print)
    try:
        loaded.launch(5, (0x100,), stream)  # type: ignore[arg-type]
    finally:
        chain.remove(print)
    with mock.patch.object(knobs.runtime, name, print):  # as older versions take it
        loaded.launch(5, (0x100,), stream)  # type: ignore[arg-type]
    launched = 5, 1, 1, 0x9000, "function", "metadata", ((5, 1, 1), 0x9000, 0x100, 1)
    later = hooks | {name: print}
    assert kernel.run.calls == [(*launched, *seen.values(), 0x100, 1) for seen in (hooks, later)]


class EveryKernel(dict[Any, Any]):
    """Has a kernel for each key, which must not be launched."""

    def get(self, key: Any, default: Any = None) -> Any:
        raise AssertionError("a compiled kernel is asked for")


def test_a_collection_launches_nothing_that_this_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is given, weights may have memory and decide the device, and the rest may have none."""
    monkeypatch.setattr(launch, "_compiled", EveryKernel())
    hidden, clip = torch.empty(4, 64, device="meta"), torch.tensor([-1.0, 1.0])
    rows = torch.empty(1, dtype=torch.int32, device="meta")
    with launch.loading_from_cache(launch.FromCache(collect=True)) as mode:
        for bounds in (clip, None):
            norms.residual_norm(hidden, torch.ones(64), hidden, rows, 1e-6, 4, clip=bounds)
    assert len(mode.jobs) == 2


@pytest.mark.parametrize("deleted", ["k.cubin", "k.json"])
def test_a_kernel_whose_files_were_partly_deleted_is_compiled_again(
    deleted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton would read the files that are left, and raise KeyError in a call."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    manager = get_cache_manager("ab")
    manager.put_group("k.json", {name: manager.put(b"code", name) for name in ("k.json", "k.cubin", "k.ptx")})
    forget_damaged("ab", "k")
    assert is_cached("ab", "k")
    next(tmp_path.rglob(deleted)).unlink()
    assert not is_cached("ab", "k") and manager.get_file("__grp__k.json")
    forget_damaged("ab", "k")
    assert not manager.get_file("__grp__k.json")


def test_a_private_cache_stands_for_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled after Triton's cache has moved is kept there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "full"))
    manager = private_cache(str(tmp_path / "private"))
    assert manager("key").cache_dir == str(tmp_path / "private" / "key")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    assert manager("key").cache_dir == str(tmp_path / "another" / "key")


def test_a_launch_that_a_hook_suppresses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`jit_cache_hook` may have Triton launch nothing, and say nothing of it."""
    monkeypatch.setattr(launch, "hash_sources", lambda *_: None)
    monkeypatch.setattr(launch.knobs.runtime, "jit_cache_hook", lambda **_: True)
    suppressed = mock.MagicMock(spec=JITFunction, arg_names=["x", "WIDTH"], __name__="a_kernel")
    suppressed.__getitem__.return_value = lambda *given, **named: None
    with pytest.raises(RuntimeError, match="a_kernel is not launched: .*jit_cache_hook"):
        launch._first_launch(suppressed, ("key",), 1, (torch.empty(1),), {"WIDTH": 1}, {})
