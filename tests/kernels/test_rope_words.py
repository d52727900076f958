"""Rotary factors as words: those of the metadata kernel, and what comes back out of a word is what went in."""

from dataclasses import replace

import pytest
import torch

from fusedvit.kernels.metadata import vision_metadata
from fusedvit.kernels.positions import CHUNK, width
from fusedvit.kernels.reference.metadata import vision_metadata as vision_metadata_ref
from fusedvit.kernels.reference.positions import packed_cos_sin
from tests.kernels.metadata_cases import UNWRITTEN, assert_same_words, fill, frames_of
from tests.kernels.support import count, random

HEADS = [24, 64, 72, 80, 128]  # one of fewer pairs than are repeated; Qwen's and GLM's
GRID = [(1, 2, 256), (0, 0, 0), (2, 6, 4), (1, 38, 2)]


def table(rows: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Angles from everywhere, and those where cos or sin is 0 or 1 or -1."""
    angle = random(rows, head_dim // 2, scale=50.0, device=device)
    angle[0, :5] = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0], device=device) * torch.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1)


@pytest.mark.parametrize("head_dim", HEADS)
def test_kernel_is_its_twin(head_dim: int, device: torch.device) -> None:
    """The same cos and sin as in the table it writes otherwise, every bit; the twin's differ in their last ones."""
    options = {"head_dim": head_dim, "side": 0, "room": 7}
    ours, twin = (fill(op, GRID, device, words=True, **options) for op in (vision_metadata, vision_metadata_ref))
    assert_same_words(ours, twin)
    tokens = sum(frames_of(GRID))
    assert ours.rope.isnan().all(), "a table beside the words"
    without = fill(vision_metadata, GRID, device, **options)
    words = torch.full_like(ours.packed_cos_sin, UNWRITTEN)
    assert torch.equal(ours.packed_cos_sin, packed_cos_sin(without.rope, count(tokens, device), words))


def test_windows_have_words(device: torch.device) -> None:
    options = {"head_dim": 80, "side": 0, "window": 8, "words": True}
    assert_same_words(*(fill(op, [(2, 18, 26)], device, **options) for op in (vision_metadata, vision_metadata_ref)))


@pytest.mark.parametrize("head_dim", HEADS)
def test_words_hold_cos_and_sin(head_dim: int) -> None:
    t = table(100, head_dim, torch.device("cpu"))
    words = torch.full((130, width(head_dim)), UNWRITTEN, dtype=torch.int32)
    packed_cos_sin(t, count(100, t.device), words)
    assert (words[100:] == UNWRITTEN).all(), "rows past the count"
    pairs, whole = head_dim // 2, words[:100].long()
    for i, half in enumerate((whole & 0xFFFF, whole >> 16 & 0xFFFF)):
        back = half.double() / 32768 - 1
        first = torch.arange(words.shape[1]) % pairs
        assert (back - t[:, i, first]).abs().max() <= 2**-15
    for col in range(0, 6 * head_dim, 2 * CHUNK):  # a chunk's words are neighbours, wherever in a head it begins
        first, wanted = col // 2 % pairs, (col // 2 + torch.arange(CHUNK)) % pairs
        assert torch.equal(words[:, first : first + CHUNK], words[:, wanted])
    assert width(head_dim) * 4 % 16 == 0, "rows that the copy engine takes"


def test_widths_must_fit(device: torch.device) -> None:
    def narrower(grid, inv_freq, out, layout):  # type: ignore[no-untyped-def]
        return vision_metadata(grid, inv_freq, replace(out, packed_cos_sin=out.packed_cos_sin[:, :36]), layout)

    with pytest.raises(AssertionError, match="rotary words 36 a token for heads of 72"):
        fill(narrower, [(1, 2, 2)], device, head_dim=72, words=True)
