"""What the kernel tests share: tensors with poison around them, and the tolerance rule as an assertion."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from fusedvit.tolerance import Comparison, compare

NAN = float("nan")


def count(n: int, device: torch.device) -> torch.Tensor:
    """`[1]` int32: a count as the kernels read it."""
    return torch.tensor([n], dtype=torch.int32, device=device)


def random(*shape: int, seed: int = 0, scale: float = 1.0, device: torch.device | str = "cpu") -> torch.Tensor:
    """N(0, scale) in fp32."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device) * scale


BEHIND = 256  # rows: a tile's or more


def padded(t: torch.Tensor, rows: int) -> torch.Tensor:
    """`t` `[n, C]` as the first rows of a `[rows, C]` tensor whose other rows, and the columns between C and the next
    multiple of 16 bytes, are NaN (a huge index for integers), and so are `BEHIND` rows behind it in its memory."""
    step = max(1, 16 // t.element_size())
    pitch = -(-t.shape[1] // step) * step
    poison = NAN if t.is_floating_point() else 2**30
    storage = torch.full((rows + BEHIND, pitch), poison, dtype=t.dtype, device=t.device)
    storage[: t.shape[0], : t.shape[1]] = t
    return storage[:rows, : t.shape[1]]


def assert_nothing_behind(t: torch.Tensor) -> None:
    """Of a tensor of `padded`: nobody has written behind it."""
    pitch, rows = t.stride(0), t.shape[0]
    behind = t.as_strided((BEHIND, pitch), (pitch, 1), t.storage_offset() + rows * pitch)
    assert bool(behind.isnan().all()), "rows behind a tensor's last were written"


def assert_within(ours: torch.Tensor, ref: torch.Tensor, pt: torch.Tensor, what: str = "") -> Comparison:
    """The tolerance rule: `ours` against `ref`, held in fp32 at most, with PyTorch's answer `pt` as the yardstick."""
    verdict = compare(ours, ref.float(), pt, ours.dtype)
    assert verdict.passed, f"{what} {verdict.reason}"
    return verdict


def assert_rounded_once(ours: torch.Tensor, ref: torch.Tensor, what: str = "") -> Comparison:
    """The rule at its strictest: as close to `ref` as if `ref` itself had been rounded to `ours`'s dtype."""
    return assert_within(ours, ref, ref.to(ours.dtype), what)


def assert_misplaced_stages_are_refused(
    monkeypatch: pytest.MonkeyPatch, backend: ModuleType, run: Callable[[], object]
) -> None:
    """`run` launches a kernel of the module `backend`: it is refused where shared memory begins with something else."""

    class Misplaced:
        def ptx(self) -> str:
            return "mbarrier.init.shared::cta.b64 [%r1], 1;"

    monkeypatch.setattr(backend, "launch", lambda *arguments: Misplaced())
    with pytest.raises(RuntimeError, match="bytes of operands, but something lies at 0"):
        run()
