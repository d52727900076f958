"""A hash of every element of tensors: tells whether what somebody wrote to parameters is what they held.

Dearer than a sampled fingerprint and cheaper than preparing weights, so it is taken only where somebody has written and
all samples are what they were. In operations of torch: it is no part of a call on unchanged weights.

    hash = sum_i mix(word(i) + golden * (i + 1))   mod 2^64,  of each `CHUNK` of 64-bit words one after another
"""

from collections.abc import Iterator, Sequence

import torch

CHUNK = 2**24  # 16-bit words that are hashed at once: 32 MiB, and as much again for what is computed
GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed word
MIXING = ((33, -49064778989728563), (33, -4265267296055464877))  # shifts and factors of MurmurHash3


def digest_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """64 bits for each chunk of `tensors`, which are dense, on one device, of 2 bytes an element or more; waits for the
    GPU. Two of tensors of the same shapes agree by accident once in 2^64."""
    found = [_hashed(chunk) for chunk in _chunks(tensors)]
    return torch.stack(found).tolist() if found else []


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors' words, `CHUNK` or fewer at a time: many tensors are small, and each chunk costs a dozen launches."""
    chunk: list[torch.Tensor] = []
    room = CHUNK
    for tensor in tensors:
        for part in tensor.as_strided((tensor.numel(),), (1,)).view(torch.int16).split(CHUNK):
            if len(part) > room:
                yield chunk
                chunk, room = [], CHUNK
            chunk.append(part)
            room -= len(part)
    if chunk:
        yield chunk


def _hashed(parts: list[torch.Tensor]) -> torch.Tensor:
    missing = -sum(map(len, parts)) % 4
    words = torch.cat([*parts, parts[0].new_zeros(missing)]).view(torch.int64)
    words += torch.arange(1, len(words) + 1, device=words.device) * GOLDEN
    for shift, factor in MIXING:
        words ^= (words >> shift) & ((1 << 64 - shift) - 1)
        words *= factor
    words ^= (words >> 33) & ((1 << 31) - 1)
    return words.sum()
