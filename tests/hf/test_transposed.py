"""Parameters that lie in memory in another order of dimensions run fused; those with gaps do not."""

from typing import Any

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.checks import fallback
from tests.hf.test_weights import like
from tests.support.families import INSTALLED, each_of, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_same,
    copy_of,
    expected_of,
    fused_tower,
    ran_fused,
    ran_original,
    tiny_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)


def transpose_(tower: Any) -> list[str]:
    """Lays the dimensions of every matrix, table and convolution out in reverse; the names of those."""
    turned = []
    for name, p in tower.named_parameters():
        if p.ndim > 1:
            order = list(reversed(range(p.ndim)))
            p.data = p.detach().permute(order).contiguous().permute(order)
            turned += [] if p.is_contiguous() else [name]
    return turned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_of(INSTALLED)
def test_every_parameter_transposed(name: str, dtype: torch.dtype) -> None:
    tower, plain = (copy_of(family_tower(name), dtype) for _ in range(2))
    call = Call.of(tower, GRIDS["images"])
    assert len(transpose_(tower)) > 5
    handles = [fusedvit.fuse(t, STRICT) for t in (tower, plain)]
    assert_same(call.run(tower), call.run(plain), limit=0)
    for handle in handles:
        ran_fused(handle, calls=1)
        table = handle.weights.get().position  # kernels take its address and width alone
        assert table is None or table.is_contiguous()


@pytest.mark.parametrize("write", ["add_", "data.add_", "data ="])
def test_every_write_is_noticed(write: str) -> None:
    tower = tiny_tower(depth=1, deepstack_visual_indexes=[0])
    turned = transpose_(tower)
    handle = fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, GRIDS["images"])
    call.run(tower)
    for i, name in enumerate(turned):
        p = tower.get_parameter(name)
        other = like(p, i)
        if write == "data =":
            p.data = other
        else:
            (p if write == "add_" else p.data).add_(other - p)
        assert not p.is_contiguous()
        call.run(tower)
        assert handle.stats()["refreshes"] == i + 2, name
    assert_same(call.run(tower), expected_of(tower, call))
    ran_fused(handle, calls=len(turned) + 2)


def test_a_matrix_laid_out_by_columns_after_a_call() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, GRIDS["mix"])
    before = call.run(tower)
    weight = tower.blocks[1].attn.proj.weight
    weight.data = weight.detach().t().contiguous().t()
    assert_same(call.run(tower), before, limit=0)
    weight.data = weight.detach().t().contiguous().view_as(weight)  # square: other content, laid out as at first
    assert_same(call.run(tower), expected_of(tower, call))
    ran_fused(handle, calls=3)


def test_held_bytes_count_what_was_copied() -> None:
    """Also the position table, which is read in place otherwise."""
    tower = tiny_tower(depth=1, deepstack_visual_indexes=[0])
    table = tower.pos_embed.weight
    handle = fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, GRIDS["images"])
    call.run(tower)
    before = handle.weights.held_bytes()
    table.data = table.detach().t().contiguous().t()
    call.run(tower)
    assert handle.weights.held_bytes() == before + table.numel() * table.element_size()
    theirs = {p.untyped_storage().data_ptr() for p in tower.parameters()}
    assert {t.untyped_storage().data_ptr() for t in handle.weights.get().borrowed()} <= theirs


def test_oft_that_was_merged() -> None:
    peft = pytest.importorskip("peft")
    tower = tiny_tower()
    handle = fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, GRIDS["mix"])
    owner = nn.Module()
    owner.visual = tower
    model = peft.get_peft_model(owner, peft.OFTConfig(oft_block_size=4, r=0, target_modules=r".*\.(attn\.proj|qkv)$"))
    for i, (name, p) in enumerate(model.named_parameters()):
        if "oft_" in name:
            p.data.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    model.eval().requires_grad_(False)
    model.merge_adapter()
    model.unmerge_adapter()
    model.merge_and_unload()
    original = copy_of(tower)
    fusedvit.unfuse(original)
    assert not tower.blocks[0].attn.qkv.weight.is_contiguous()
    assert_same(call.run(tower), call.run(original))
    ran_fused(handle, calls=1)


@pytest.mark.parametrize("view", ["every other row", "wide rows", "repeated"])
def test_gaps_run_the_original_code(view: str) -> None:
    tower, handle, call = fused_tower(grid=GRIDS["images"])
    weight = tower.blocks[0].attn.proj.weight
    new = {
        "every other row": weight.detach().repeat_interleave(2, 0)[::2],
        "wide rows": torch.cat([weight.detach(), weight.detach()], 1)[:, : weight.shape[1]],
        "repeated": weight.detach()[:1].expand_as(weight),
    }
    weight.data = new[view]
    call.run(tower)
    ran_original(handle, fallback.MODIFIED, calls=1)
    assert str(handle.reason()).endswith("blocks.0.attn.proj.weight is not dense in memory")
