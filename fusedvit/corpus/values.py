"""Values of a batch's columns as sources of pixels, and as Pillow images."""

import os
from collections.abc import Iterable, Iterator, Mapping, Set, Sized
from typing import Any

import numpy as np

from fusedvit.errors import attempted, first_line
from fusedvit.pixels.media import (
    SOURCES,
    Limits,
    MediaError,
    Source,
    decoders,
    load_one,
    raise_of_machine,
    rgb_of,
)

PATHS = ("path", "file", "image_path")
COLUMNS = ("image", "bytes", *PATHS)  # the first of these in a batch or a table is read
_PICKLED = "ray.data.arrow_pickled_object"  # Ray's type of Python objects in Arrow tables


def checked_names(names: Any) -> list[str]:
    """The names of sources as a list. Raises TypeError if they are none."""
    listed = isinstance(names, Sized) and _has_values(names) and not isinstance(names, str | bytes | Mapping | Set)
    found = list(names) if listed else []
    if not listed or not all(isinstance(name, str) for name in found):
        kinds = ", ".join(sorted({type(name).__name__ for name in found if not isinstance(name, str)}))
        got = type(names).__name__ + (f" of {kinds}" if kinds else "")
        raise TypeError(f"fusedvit: names: a list of strings, one of each source, expected, got {got}")
    return found


def as_many(sources: Iterable[Source], names: int, given: Any) -> Iterator[Source]:
    """The sources, which `each_of` gives of `given`. Raises ValueError if their number is not that of the names: at
    once if it is known."""
    expected = f"fusedvit: embed: a name of each source expected, got {names} names and"
    known = sources if isinstance(sources, Sized) else given
    if isinstance(known, Sized) and len(known) != names:
        raise ValueError(f"{expected} {len(known)} sources")
    count = 0
    for source in sources:
        if count == names:
            raise ValueError(f"{expected} more sources")
        yield source
        count += 1
    if count != names:
        raise ValueError(f"{expected} {count} sources")


def columns_of(batch: Any) -> list[str]:
    """The names of a batch's columns. Raises TypeError if `batch` has no columns."""
    names = batch.column_names if _is_arrow(batch) else batch.keys() if hasattr(batch, "keys") else None
    if names is None:
        raise TypeError(
            f"fusedvit: a dictionary of columns, a pandas frame or an Arrow table expected, got {type(batch).__name__}"
        )
    return list(map(str, names))


def with_columns(batch: Any, added: dict[str, list[Any]], several: bool) -> Any:
    """The batch with the columns `added`, which replace columns of their names: a dictionary, or an Arrow table whose
    other columns and metadata stay as they are. `several`: an embedding is several vectors, not one."""
    if not _is_arrow(batch):
        return {**batch, **added}
    import pyarrow

    vector = pyarrow.list_(pyarrow.float32())
    kinds = {"grid_thw": pyarrow.list_(pyarrow.int64()), "error": pyarrow.string()}
    kinds["embedding"] = pyarrow.list_(vector) if several else vector
    table = batch if isinstance(batch, pyarrow.Table) else pyarrow.Table.from_batches([batch])
    table = table.select([i for i, name in enumerate(table.column_names) if name not in added])
    for name, values in added.items():
        rows = [list(value) for value in values] if name == "embedding" and several else values
        table = table.append_column(name, pyarrow.array(rows, kinds[name]))
    return table


def _is_arrow(batch: Any) -> bool:
    """Whether a batch is an Arrow table or an Arrow record batch."""
    return hasattr(batch, "column_names") and hasattr(batch, "schema")


def check_many(column: str, values: Any) -> None:
    """Raises TypeError unless a column holds one value per row."""
    if is_one_row(values):
        got = f"one value, {type(values).__name__}; call with batches"
    elif not _has_values(values):
        got = type(values).__name__
    else:
        return
    raise TypeError(f"fusedvit: column {column}: a list of values, one a row, expected, got {got}")


def _has_values(several: Any) -> bool:
    """Whether `several` can be iterated, be it by `__getitem__` alone."""
    try:
        iter(several)
    except TypeError:
        return False
    return True


def is_one_row(values: Any) -> bool:
    """Whether a column holds a single image instead of a list: a path, a file's bytes, a picture or its pixels."""
    if isinstance(values, np.ndarray):
        return values.ndim == 0 or (values.ndim == 3 and values.shape[-1] == 3)
    one = (str, os.PathLike, bytes, bytearray, memoryview, Mapping)
    return isinstance(values, one) or hasattr(values, "as_py") or hasattr(values, "convert")


def content_of(value: Any) -> Any:
    """A file's bytes, else its path, from an Arrow value or {"bytes": …, "path": …}; the array of a tensor in a column
    of Arrow's or Ray's. Where there are bytes the path is not converted, as it may be in any encoding. Raises Arrow's
    error for a value that does not convert, and TypeError for a pickled object: to unpickle it could run any code."""
    if hasattr(value, "to_numpy"):
        return value.to_numpy()
    while hasattr(value, "as_py") and hasattr(value, "value"):  # of a dictionary or extension type
        if value.is_valid and getattr(value.type, "extension_name", "") == _PICKLED:
            raise TypeError('a pickled object of Ray\'s; with batch_format="numpy" it comes as what it is')
        value = value.value
    if isinstance(value, Mapping):  # Arrow's structs too
        parts = (content_of(value[name]) for name in ("bytes", "path") if name in value)
        return next(filter(None, parts), None)
    return value.as_py() if hasattr(value, "as_py") else value


def source_of(value: Any) -> Source:
    """A row's value as a source of pixels; a `MediaError` if it is none."""
    given = attempted(lambda: content_of(value))
    if isinstance(given, Exception) and given is not value:  # text that is not UTF-8, which Arrow does not check
        return MediaError(f"a value that does not convert: {first_line(given)}")
    value = given
    if isinstance(value, np.generic):
        value = value.item()
    if hasattr(value, "convert"):  # a Pillow image, as `datasets` decodes them
        try:
            return rgb_of(value)
        except Exception as error:  # Pillow reads the file only now, and it is damaged
            raise_of_machine(error, "an image")
            return MediaError(f"an image that does not decode ({type(error).__name__})")
    if isinstance(value, SOURCES):
        return value
    return MediaError(f"a path, a file's bytes, an image or pixels expected, got {type(value).__name__}")


@decoders()
def image_of(source: Source, limits: Limits | None, index: int) -> Any:
    """A Pillow image, or the source's error."""
    from PIL import Image

    try:
        media = load_one(source, 1, limits, index)
    except MediaError as error:
        return error
    if media.kind == "video":
        return MediaError(f"{media.shown}: a video, and encode= takes images", index)
    return Image.fromarray(media.frames[0])
