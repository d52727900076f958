"""Reference of `kernels.fingerprint`."""

import functools

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
    """The groups that are read, and what is added to each."""
    group = sampled_groups(groups)
    salt = ((torch.arange(len(group), device="cpu") + 1) * _GOLDEN).to(torch.int32)
    return group.to(device), salt.to(device)


def _hash(words: torch.Tensor) -> torch.Tensor:
    groups = len(words) // GROUP
    group, salt = _samples(groups, words.device)
    low, high = words[: GROUP * groups].view(-1, GROUP)[group].view(torch.int32).unbind(1)
    last = words[GROUP * groups :].to(torch.int32)
    i = torch.arange(len(last), device=words.device) - GROUP
    return _mix(_mix(low + salt) ^ high).sum() + _mix(last + (i * _GOLDEN).to(torch.int32)).sum()


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
    for i, t in enumerate(sources.tensors):
        out[i] = _hash(t.as_strided((t.numel(),), (1,)).view(torch.int16)).to(torch.int32)
    return out
