"""Formats of images and videos that are decoded, by suffix and by a file's first bytes."""

_COMMON = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
# Pillow runs Ghostscript on EPS, which is a program; it only recognises the others, or decodes them on Windows alone.
NO_IMAGES = frozenset(("EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF"))
_OPENED_AS = {"MPO": "JPEG"}  # formats that another format's plugin opens
# suffix -> FFmpeg's name of the format
VIDEO_FORMATS = {
    **dict.fromkeys((".mp4", ".m4v", ".3gp", ".3g2"), "mp4"),
    **dict.fromkeys((".mov", ".qt"), "mov"),
    **dict.fromkeys((".mkv", ".webm"), "matroska"),
    **dict.fromkeys((".mpg", ".mpeg"), "mpeg"),
    **dict.fromkeys((".m2ts", ".mts"), "mpegts"),
    **dict.fromkeys((".wmv", ".asf"), "asf"),
    **{".avi": "avi", ".flv": "flv", ".ogv": "ogg"},
}
# kinds of MP4 that hold pictures: AVIF and HEIF
_PICTURES = frozenset((b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"))


def suffixes() -> frozenset[str]:
    """Suffixes, in lower case, of videos and of images that the installed Pillow decodes, registered plugins
    included."""
    from PIL import Image

    decoded = set(image_formats())
    known = Image.registered_extensions().items()
    return frozenset(VIDEO_FORMATS) | {suffix for suffix, name in known if _OPENED_AS.get(name, name) in decoded}


def image_formats() -> tuple[str, ...]:
    """Pillow's names of the formats that it decodes and has a suffix for, in the order in which it tries them."""
    from PIL import Image

    named = dict.fromkeys((*_COMMON, *Image.registered_extensions().values()))
    return tuple(name for name in named if name in Image.OPEN and name not in NO_IMAGES)


def video_format(head: bytes) -> str | None:
    """FFmpeg's name of the video format that begins with `head`; None for anything else."""
    if head[4:8] == b"ftyp":
        return None if head[8:12] in _PICTURES else "mp4"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    return "avi" if head[:4] == b"RIFF" and head[8:12] == b"AVI " else None
