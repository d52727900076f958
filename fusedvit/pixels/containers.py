"""Whether a video's file is as long as its container says: FFmpeg takes the end of a cut-off file for the video's end.

    MP4, MOV    the boxes that follow one another each say their length
    Matroska    the segment, which holds everything else, says its length, unless it was written as a live stream
    AVI         the RIFF lists that follow one another each say their length

A file that states no length, or an impossible one, passes.
"""

import os
from collections.abc import Callable
from typing import BinaryIO

_BOXES = frozenset((b"ftyp styp moov moof mdat mfra sidx ssix prft emsg meta free skip wide uuid udta pdin").split())
_PADDING = frozenset((b"free", b"skip", b"wide"))  # losing their ends loses nothing
_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
_PARTS = 100_000  # the most that are read: a file of nothing but headers would take minutes
_RIFF_SLACK = 8  # bytes; some writers count the list's own header
_STREAMED = (0, 0xFFFFFFFF)  # lengths of a RIFF list whose writer could not seek back


def missing_bytes(file: BinaryIO, container: str) -> int:
    """How many bytes `file` lacks of the length it states; 0 where none, or where that is unknown.

    Args:
        file: at any position, which this changes.
        container: FFmpeg's name of the container.
    """
    size = file.seek(0, os.SEEK_END)
    end = _ENDS[container](file, size) if container in _ENDS else 0
    return max(0, end - size)


def _end_of_boxes(file: BinaryIO, size: int) -> int:
    at = 0
    for _ in range(_PARTS):
        head = _read(file, at, 16)
        if len(head) < 8:
            break
        length, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if length == 1:  # the length follows the name, in 64 bits
            length = int.from_bytes(head[8:], "big")
        if kind not in _BOXES or length < 8:  # a box to the end of the file, or appended data
            return 0
        at += length
        if at > size:
            return 0 if kind in _PADDING else at
    return 0


def _end_of_segment(file: BinaryIO, size: int) -> int:
    at = 0
    while at + 5 <= size:
        head = _read(file, at, 12)
        name, length, width = head[:4], *_ebml_number(head[4:])
        if name not in (_EBML, _SEGMENT) or length is None:
            return 0
        at += 4 + width + length
        if name == _SEGMENT:
            return at
    return 0


def _ebml_number(data: bytes) -> tuple[int | None, int]:
    """An EBML length and how many bytes it takes; None where the length is left open."""
    width = 9 - data[0].bit_length() if data else 9
    if width > min(8, len(data)):
        return None, 0
    value = int.from_bytes(data[:width], "big") & ((1 << 7 * width) - 1)
    return (None if value == (1 << 7 * width) - 1 else value), width


def _end_of_lists(file: BinaryIO, size: int) -> int:
    at = 0
    for _ in range(_PARTS):
        head = _read(file, at, 12)
        if len(head) < 12:
            break
        length = int.from_bytes(head[4:8], "little")
        if head[:4] != b"RIFF" or head[8:11] != b"AVI" or length in _STREAMED:
            return 0
        at += 8 + length + length % 2
    return at if at > size + _RIFF_SLACK else 0


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


_ENDS: dict[str, Callable[[BinaryIO, int], int]] = {
    "mp4": _end_of_boxes,
    "mov": _end_of_boxes,
    "matroska": _end_of_segment,
    "avi": _end_of_lists,
}
