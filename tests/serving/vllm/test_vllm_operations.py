"""vLLM's operations take one of several registered implementations: only vLLM's own are what the tower computes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import ir
from vllm.ir.op import IrOp

import fusedvit
from tests.serving.vllm.support import GRIDS, close, embed, load

GRID = GRIDS["images"]


@pytest.fixture(scope="module")
def served() -> tuple[Any, Any]:
    """A model whose norms are such operations."""
    return load("Qwen2_5_VLForConditionalGeneration")


def other(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    return 1.5 * torch.nn.functional.rms_norm(x, x.shape[-1:], weight, epsilon)


CHOSEN = SimpleNamespace(
    provider="native", impl_fn=other, func_impl_fn=other, supported=True, supports_args=lambda *_: True
)


def prefer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ir.ops.rms_norm, "impls", dict(ir.ops.rms_norm.impls))
    ir.ops.rms_norm.register_impl("somebodys")(other)
    patch.setattr(ir.ops.rms_norm, "_priority_impls", [])  # put back as it was
    ir.ops.rms_norm.set_default(["somebodys"])


def choose(patch: pytest.MonkeyPatch) -> None:
    theirs = IrOp.dispatch
    patch.setattr(IrOp, "dispatch", lambda op, *args: CHOSEN if op.name == "rms_norm" else theirs(op, *args))


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "another is preferred": prefer,
    "a function is replaced": lambda patch: patch.setattr(ir.ops.rms_norm.impls["native"], "impl_fn", other),
    "the last one is replaced": lambda patch: patch.setitem(ir.ops.rms_norm.impls, "native", CHOSEN),
    "the operation is replaced": lambda patch: patch.setattr(ir.ops, "rms_norm", other),
    "what chooses is replaced": choose,
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_implementations_are_noticed(change: str, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = served
    handle = fusedvit.fuse(model)
    before, fused = embed(config, model, GRID), handle.stats()["fused"]
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        assert not close(embed(config, model, GRID), before)
        assert handle.stats()["fused"] == fused and "vllm.ir.op" in str(handle.reason())
    assert close(embed(config, model, GRID), before) and handle.stats()["fused"] == fused + 1


def test_another_implementation_in_the_same_list_is_noticed(served: Any) -> None:
    config, model = served
    handle = fusedvit.fuse(model)
    before, fused = embed(config, model, GRID), handle.stats()["fused"]
    preferred = ir.ops.rms_norm._priority_impls
    preferred.insert(0, CHOSEN)
    try:
        assert not close(embed(config, model, GRID), before)
        assert handle.stats()["fused"] == fused and "'native' of vllm.ir.ops.rms_norm" in str(handle.reason())
    finally:
        preferred.remove(CHOSEN)
    assert close(embed(config, model, GRID), before) and handle.stats()["fused"] == fused + 1


def test_another_of_vllms_own_may_be_preferred(served: Any) -> None:
    config, model = served
    handle = fusedvit.fuse(model)
    before, fused = embed(config, model, GRID), handle.stats()["fused"]
    with ir.ops.rms_norm.set_priority(["native"]):
        assert close(embed(config, model, GRID), before) and handle.stats()["fused"] == fused + 1
