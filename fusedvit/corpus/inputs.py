"""A corpus as a list of inputs: folders, files, lists of files and parquet tables, in an order that never changes."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from fusedvit.errors import InputError, first_line
from fusedvit.pixels.media import IMAGE_SUFFIXES, VIDEO_FORMATS

LISTS, TABLES = (".txt", ".lst"), (".parquet",)
CONTENTS = ("image", "bytes")  # columns of a table that hold files' contents, or {"bytes": …, "path": …}
PATHS = ("path", "file", "image_path")


@dataclass(frozen=True)
class Input:
    """One image or video.

    Attributes:
        id: as it was found: a path, or what a table's `id` column says; no two inputs share it.
        path: of the file, or of the table.
        row: of the table; -1 for a file.
    """

    id: str
    path: Path
    row: int = -1


def collect(given: Sequence[str | Path]) -> list[Input]:
    """Every input of folders (searched through, sorted), media files, `.txt` lists with a path a line, and `.parquet`.

    Raises:
        InputError: something is no such thing, cannot be read, or two inputs have the same id.
    """
    found = [each for source in given for each in _inputs_of(Path(source))]
    seen: set[str] = set()
    for each in found:
        if each.id in seen:
            raise InputError(f"two inputs are called {each.id!r}: give each once, and tables an id column of their own")
        seen.add(each.id)
    if not found:
        raise InputError(f"no images or videos in {', '.join(map(str, given))}")
    return found


def digest(inputs: Iterable[Input]) -> str:
    """Tells one list of inputs from another, by their ids and order."""
    hashed = hashlib.sha256()
    for each in inputs:
        hashed.update(each.id.encode("utf-8", "surrogateescape") + b"\0")
    return hashed.hexdigest()[:32]


def sources(inputs: Sequence[Input]) -> Iterator[Path | bytes]:
    """What `fusedvit.pixels.stream` takes, for each input.

    Raises:
        InputError: a table does not read.
    """
    table: _Table | None = None  # one at a time: inputs come in the order of their tables
    for each in inputs:
        if each.row < 0:
            yield each.path
            continue
        if table is None or table.path != each.path:
            table = _Table(each.path)
        yield table.content(each.row)


def _inputs_of(source: Path) -> Iterator[Input]:
    suffix = source.suffix.lower()
    if "://" in str(source)[:20] or str(source).startswith(("http:/", "https:/")):
        raise InputError(f"{source}: a URL; download it and give the folder")
    if source.is_dir():
        media = (path for path in sorted(source.rglob("*")) if path.suffix.lower() in (*IMAGE_SUFFIXES, *VIDEO_FORMATS))
        yield from (Input(str(path), path) for path in media if path.is_file())
    elif not source.is_file():
        raise InputError(f"{source}: no such file or folder")
    elif suffix in LISTS:
        lines = source.read_text(encoding="utf-8").splitlines()
        yield from (Input(line.strip(), source.parent / line.strip()) for line in lines if line.strip())
    elif suffix in TABLES:
        yield from _rows_of(source)
    elif suffix in (*IMAGE_SUFFIXES, *VIDEO_FORMATS):
        yield Input(str(source), source)
    else:
        known = "a folder, an image or video, a .txt with a path a line or a .parquet with a column of paths or bytes"
        raise InputError(f"{source}: {known} expected")


def _rows_of(table: Path) -> Iterator[Input]:
    import pyarrow.parquet

    schema = _reading(table, lambda: pyarrow.parquet.read_schema(table))
    names = set(schema.names)
    if not names & {*CONTENTS, *PATHS}:
        raise InputError(f"{table}: a column of {', '.join((*CONTENTS, *PATHS))} expected, got {sorted(names)}")
    wanted = [name for name in ("id", *PATHS) if name in names]
    columns = _reading(table, lambda: pyarrow.parquet.read_table(table, columns=wanted)).to_pydict()
    path_column = next((columns[name] for name in PATHS if name in names), None)
    by_path = not names & set(CONTENTS)
    for row in range(_reading(table, lambda: pyarrow.parquet.read_metadata(table)).num_rows):
        path = f"{table}:{row}" if path_column is None else str(path_column[row])
        called = str(columns["id"][row]) if "id" in names else path
        yield Input(called, table.parent / path) if by_path else Input(called, table, row)


class _Table:
    """The contents of one table's files, of which one group of rows is in memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self.path = path
        self._file = _reading(path, lambda: pyarrow.parquet.ParquetFile(path))
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._ends = list(accumulate(groups))
        self._column = next(name for name in CONTENTS if name in self._file.schema_arrow.names)
        self._group = -1
        self._values: Any = []

    def content(self, row: int) -> bytes | Path:
        """A file's bytes, or its path beside the table; nothing (which does not decode) where the row holds neither."""
        group = bisect_right(self._ends, row)
        if group != self._group:
            read = _reading(self.path, lambda: self._file.read_row_group(group, columns=[self._column]))
            self._group, self._values = group, read[self._column]
        value = self._values[row - (self._ends[group - 1] if group else 0)].as_py()
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str):
            return self.path.parent / value
        return value if isinstance(value, bytes) else b""


def _reading(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # pyarrow's own, for what is damaged, no parquet, or gone
        raise InputError(f"{path}: no parquet file that reads: {first_line(error)}") from None
