"""A hash of every element of tensors: tells whether a write to parameters changed any value.

It costs more than a sampled fingerprint and less than preparing weights, so it is taken only if parameters were written
and all samples are unchanged. It uses torch operations, as calls on unchanged weights do not run it.

    hash = sum_i mix(word(i) + golden * (i + 1))   mod 2^64,  over the 64-bit words of each chunk in order
"""

from collections.abc import Iterator, Sequence

import torch

CHUNK = 2**24  # 16-bit words that are hashed at once: 32 MiB, and as much again for intermediates
GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed word
MIXING = ((33, -49064778989728563), (33, -4265267296055464877))  # shifts and factors of MurmurHash3


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether `tensor` may be read: sharding frees memory, and a wrapper around other tensors has none."""
    return not tensor.numel() or (tensor.untyped_storage().nbytes() > 0 and tensor.data_ptr() != 0)


def digest_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """64 bits for each chunk of `tensors`, which must be dense, on one device, with elements of 2 bytes or more.

    Waits for the GPU. Digests of different tensors of the same shapes agree by accident once in 2^64.
    """
    found = [_hashed(chunk) for chunk in _chunks(tensors)]
    return torch.stack(found).tolist() if found else []


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors' 16-bit words in chunks of at most `CHUNK`. Small tensors share one: each costs a dozen launches."""
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
