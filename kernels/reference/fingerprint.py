"""Reference of `kernels.fingerprint`."""

import functools
from collections.abc import Sequence

import numpy as np
import torch

from fusedvit.kernels.fingerprint import GROUP, SAMPLES, FingerprintSources

_GOLDEN = 0x9E3779B9
_WORD = np.uint32  # products and sums of this type wrap


def _mix(x: np.ndarray) -> np.ndarray:
    """Of uint32."""
    for _ in range(2):
        x = (x ^ (x >> 16)) * _WORD(0x45D9F3B)
    return x ^ (x >> 16)


def _salted(x: np.ndarray, i: np.ndarray) -> np.ndarray:
    """uint32: `x` + golden * `i`, wrapped."""
    return x + i.astype(_WORD) * _WORD(_GOLDEN)


def sampled_groups(groups: int) -> torch.Tensor:
    """`[min(groups, SAMPLES)]` int64: which groups of `GROUP` words of a tensor are read."""
    s = np.arange(min(groups, SAMPLES))
    if groups <= SAMPLES:
        return torch.from_numpy(s)
    begin = s * groups // SAMPLES
    share = (s + 1) * groups // SAMPLES - begin
    drawn = _mix((s * _GOLDEN + groups).astype(_WORD)) & 0x7FFFFFFF
    return torch.from_numpy(begin + (drawn * share >> 31))


@functools.lru_cache(maxsize=256)
def _sampled_on(groups: int, device: torch.device) -> torch.Tensor:
    return sampled_groups(groups).to(device)


def _sums(parts: list[torch.Tensor], hashed: np.ndarray) -> np.ndarray:
    """`[P]` uint32: of each part of `hashed`, which lie one after another, the sum, wrapped."""
    ends = np.cumsum([len(part) for part in parts])
    return np.diff(np.append(_WORD(0), np.cumsum(hashed, dtype=_WORD))[ends], prepend=_WORD(0))


def _on_host(parts: list[torch.Tensor]) -> np.ndarray:
    return torch.cat(parts).cpu().numpy()


def _hashes(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """`[P]` uint32, of all tensors at once: most are small, and a call of torch costs more than its work.

    Words are hashed on the CPU, wherever they are: on a GPU each of these operations is loaded when it is first used.
    They are hashed by NumPy, in one thread: OpenMP's threads, which PyTorch uses, took 0.1 s to start in a container.
    """
    words = [t.as_strided((t.numel(),), (1,)).view(torch.int16) for t in tensors]
    counts = [len(w) // GROUP for w in words]
    read = [w[: GROUP * n].view(-1, GROUP)[_sampled_on(n, w.device)] for w, n in zip(words, counts, strict=True)]
    low, high = _on_host(read).view(_WORD).T
    samples = np.concatenate([np.arange(len(part)) for part in read])
    found = _sums(read, _mix(_mix(_salted(low, samples + 1)) ^ high))
    odd = [i for i, (w, n) in enumerate(zip(words, counts, strict=True)) if len(w) > GROUP * n]
    if odd:
        last = [words[i][GROUP * counts[i] :] for i in odd]
        left = np.concatenate([np.arange(len(w)) for w in last])
        found[odd] += _sums(last, _mix(_salted(_on_host(last).astype(_WORD), left - GROUP)))
    return found


def fingerprint(
    sources: FingerprintSources,
    out: torch.Tensor,
    grid: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    stream: torch.cuda.Stream | None = None,
) -> torch.Tensor:
    """See `fusedvit.kernels.fingerprint.fingerprint`."""
    if grid is not None and rows is not None:
        rows[: grid.shape[0]].copy_(grid)
    if not out.numel():
        return out
    return out.copy_(torch.from_numpy(_hashes(sources.tensors).view(np.int32)))
