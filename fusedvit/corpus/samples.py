"""Digests of files by samples of their content: milliseconds for gigabytes."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_SAMPLE = 512  # bytes, at the beginning, the middle and the end of a tensor
_SAMPLES = 256  # of a file without a list of tensors
_TAIL = 64 * 2**10  # bytes at a file's end: a parquet table's footer
_SMALL = 16 * 2**20  # bytes up to which a table is read whole


def digest(parts: Iterable[bytes]) -> str:
    """A digest of the parts and of where each ends."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()[:32]


def sample(file: BinaryIO, begin: int, end: int) -> bytes:
    """All bytes from `begin` to `end` if they are few, else those of both ends and the middle."""
    if end - begin <= 3 * _SAMPLE:
        file.seek(begin)
        return file.read(max(0, end - begin))
    found = b""
    for at in (begin, (begin + end - _SAMPLE) // 2, end - _SAMPLE):
        file.seek(at)
        found += file.read(_SAMPLE)
    return found


def of_file(path: Path) -> Iterator[bytes]:
    """A file's size, its end, and samples throughout it. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        yield size.to_bytes(8, "little")
        file.seek(max(0, size - _TAIL))
        yield file.read()
        step = max(1, -(-size // _SAMPLES))
        for begin in range(0, size, step):
            yield sample(file, begin, min(size, begin + step))


def table_digest(path: Path) -> str:
    """A digest of a table's content: of all of it if it is small, as tables of paths are, else of the samples of
    `of_file`. Raises OSError if it cannot be read."""
    return digest([path.read_bytes()] if path.stat().st_size <= _SMALL else of_file(path))
