"""File names, cut to the room that there is for them."""


def shorten(name: str, room: int) -> str:
    """`name` in at most `room` characters (4 or more): its two ends, where it does not fit."""
    tail = (room - 1) // 2
    return name if len(name) <= room else f"{name[: room - 1 - tail]}…{name[-tail:]}"


def stem(name: str, room: int) -> str:
    """`shorten` of a file name without its suffix."""
    return shorten(name.rpartition(".")[0] or name, room)
