"""Rotary factors as words: the kernel is its twin, and what comes back out of a word is what went in."""

import pytest
import torch

from fusedvit.kernels.reference.rope_words import rope_words as rope_words_ref
from fusedvit.kernels.rope_words import CHUNK, rope_words, width
from tests.kernels.support import count, random

UNWRITTEN = -77


def table(rows: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Angles from everywhere, and those where cos or sin is 0 or 1 or -1."""
    angle = random(rows, head_dim // 2, scale=50.0, device=device)
    angle[0, :5] = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0], device=device) * torch.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1)


@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
@pytest.mark.parametrize("rows", [0, 1, 64, 100])
def test_kernel_is_its_twin(head_dim: int, rows: int, device: torch.device) -> None:
    t = table(130, head_dim, device)
    t[rows:] = float("nan")
    words = [torch.full((130, width(head_dim)), UNWRITTEN, dtype=torch.int32, device=device) for _ in range(2)]
    rope_words(t, count(rows, device), words[0])
    rope_words_ref(t, count(rows, device), words[1])
    assert torch.equal(words[0], words[1])
    assert (words[0][rows:] == UNWRITTEN).all(), "rows past the count"


@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_words_hold_cos_and_sin(head_dim: int) -> None:
    t = table(100, head_dim, torch.device("cpu"))
    words = torch.empty(100, width(head_dim), dtype=torch.int32)
    rope_words_ref(t, count(100, t.device), words)
    pairs, whole = head_dim // 2, words.long()
    for i, half in enumerate((whole & 0xFFFF, whole >> 16 & 0xFFFF)):
        back = half.double() / 32768 - 1
        first = torch.arange(words.shape[1]) % pairs
        assert (back - t[:, i, first]).abs().max() <= 2**-15
    for col in range(0, 6 * head_dim, 2 * CHUNK):  # a chunk's words are neighbours, wherever in a head it begins
        first, wanted = col // 2 % pairs, (col // 2 + torch.arange(CHUNK)) % pairs
        assert torch.equal(words[:, first : first + CHUNK], words[:, wanted])
    assert width(head_dim) * 4 % 16 == 0, "rows that the copy engine takes"


def test_shapes_must_fit(device: torch.device) -> None:
    with pytest.raises(AssertionError, match=r"words \(4, 36\) for a table \(4, 2, 36\)"):
        rope_words(torch.zeros(4, 2, 36), count(4, device), torch.zeros(4, 36, dtype=torch.int32))
