"""Reference of `kernels.fingerprint`."""

import functools
from collections.abc import Sequence

import torch

from fusedvit.kernels.fingerprint import GROUP, SAMPLES, FingerprintSources

_GOLDEN = 0x9E3779B9


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Of int32; products are taken in int64, which do not overflow, and wrapped."""
    for _ in range(2):
        x = ((x ^ ((x >> 16) & 0xFFFF)).long() * 0x45D9F3B).to(torch.int32)
    return x ^ ((x >> 16) & 0xFFFF)


def sampled_groups(groups: int) -> torch.Tensor:
    """`[min(groups, SAMPLES)]` int64: which groups of `GROUP` words of a tensor are read."""
    s = torch.arange(min(groups, SAMPLES), device="cpu")
    if groups <= SAMPLES:
        return s
    begin = s * groups // SAMPLES
    share = (s + 1) * groups // SAMPLES - begin
    drawn = (_mix((s * _GOLDEN + groups).to(torch.int32)) & 0x7FFFFFFF).long()
    return begin + (drawn * share >> 31)


@functools.lru_cache(maxsize=256)
def _samples(groups: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The groups that are read, on the device, and what is added to each, on the CPU."""
    group = sampled_groups(groups)
    return group.to(device), ((torch.arange(len(group), device="cpu") + 1) * _GOLDEN).to(torch.int32)


def _sums(parts: list[torch.Tensor], hashed: torch.Tensor) -> torch.Tensor:
    """`[P]` int64: of each part of `hashed`, which lie one after another, the sum."""
    ends = torch.tensor([len(part) for part in parts], device="cpu").cumsum(0)
    return torch.nn.functional.pad(hashed.cumsum(0), (1, 0))[ends].diff(prepend=ends.new_zeros(1))


def _hashes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[P]` int64 on the CPU, of all tensors at once: most are small, and a call of torch costs more than its work.

    Words are hashed on the CPU, wherever they are: on a GPU each of these operations is loaded when it is first used.
    """
    words = [t.as_strided((t.numel(),), (1,)).view(torch.int16) for t in tensors]
    counts = [len(w) // GROUP for w in words]
    samples = [_samples(n, w.device) for n, w in zip(counts, words, strict=True)]
    read = [w[: GROUP * n].view(-1, GROUP)[group] for w, n, (group, _) in zip(words, counts, samples, strict=True)]
    low, high = torch.cat(read).cpu().view(torch.int32).unbind(1)
    found = _sums(read, _mix(_mix(low + torch.cat([salt for _, salt in samples])) ^ high))
    odd = [i for i, (w, n) in enumerate(zip(words, counts, strict=True)) if len(w) > GROUP * n]
    if odd:
        last = [words[i][GROUP * counts[i] :] for i in odd]
        left = torch.cat([torch.arange(len(w), device="cpu") for w in last]) - GROUP
        found[odd] += _sums(last, _mix(torch.cat(last).cpu().to(torch.int32) + (left * _GOLDEN).to(torch.int32)))
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
    return out.copy_(_hashes(sources.tensors).to(torch.int32))
