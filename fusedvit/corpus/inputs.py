"""A corpus as a list of inputs: folders, files, lists of files and parquet tables, in an order that never changes."""

import functools
import hashlib
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from fusedvit.corpus.samples import table_digest
from fusedvit.corpus.values import COLUMNS, PATHS, content_of
from fusedvit.errors import InputError, as_input_error, attempted, first_line
from fusedvit.pixels.formats import suffixes
from fusedvit.pixels.media import MediaError, NamedBytes, Source, is_url

LISTS, TABLES = (".txt", ".lst"), (".parquet",)
_NAMED = 8  # suffixes in a message


@dataclass(frozen=True)
class Input:
    """One image or video.

    Attributes:
        id: unique: a file's path as it was found, or a table's value (`id`, else a path, else TABLE:ROW).
        path: the path of the file, or of the table.
        row: the row of the table; -1 for a file.
        table: the digest of the table's content as it was listed; "" for a file.
    """

    id: str
    path: Path
    row: int = -1
    table: str = ""


def collect(given: Sequence[str | Path], left_out: Counter[str] | None = None) -> list[Input]:
    """Every input of folders (recursively, through links, too; sorted), media files, `.txt` lists with one path a line,
    and `.parquet` tables.

    `left_out` gets the counts, by suffix, of the folders' files that are neither images nor videos.

    Raises:
        InputError: one of `given` is none of these or cannot be read, or two inputs have the same id.
    """
    left_out = Counter() if left_out is None else left_out
    found = [each for source in given for each in _inputs_of(source, left_out)]
    seen: set[str] = set()
    for each in found:
        if each.id in seen:
            raise InputError(f"two inputs are called {each.id!r}: give each once, and tables an id column of their own")
        seen.add(each.id)
    if not found:
        others = f" ({in_words(left_out)})" if left_out else ""
        raise InputError(f"no images or videos in {', '.join(map(str, given))}{others}")
    return found


def in_words(left_out: Counter[str]) -> str:
    """The counts of files that `collect` has left out, in one line."""
    found = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{suffix!r} {count}" if suffix else f"none {count}" for suffix, count in found[:_NAMED]]
    others = sum(count for _, count in found[_NAMED:])
    return f"left out of folders, by suffix: {', '.join([*named, *([f'others {others}'] if others else [])])}"


def digest(inputs: Iterable[Input]) -> str:
    """A digest of the inputs' ids and order."""
    hashed = hashlib.sha256()
    for each in inputs:
        hashed.update(each.id.encode() + b"\0")
    return hashed.hexdigest()[:32]


def sources(inputs: Sequence[Input]) -> Iterator[Source]:
    """The source of each input, for `fusedvit.pixels.stream`.

    Raises:
        InputError: a table cannot be read, or holds other content than when it was listed.
    """
    table: _Table | None = None  # one at a time: inputs come in the order of their tables
    for each in inputs:
        if each.row < 0:
            yield each.path
            continue
        if table is None or table.path != each.path:
            table = _open_table(each.path, each.table)  # stays open for the next shards, with a group of rows in memory
            table.check()
        yield table.content(each.row)


def _inputs_of(given: str | Path, left_out: Counter[str]) -> Iterator[Input]:
    if not str(given):
        raise InputError("an input without a name: a folder, file, list or table expected, got ''")
    _check_no_url(str(given))  # before Path() turns its two slashes into one
    source = Path(given)
    suffix = source.suffix.lower()
    if os.path.isdir(source):
        yield from (Input(_text(path), path) for path in _media_in(source, left_out))
    elif not os.path.isfile(source):
        raise InputError(f"{_text(source)}: {_why_no_file(source)}")
    elif suffix in LISTS:
        yield from (Input(line, source.parent / line) for line in _lines_of(source))
    elif suffix in TABLES:
        yield from _rows_of(source)
    elif not suffix or suffix in suffixes():
        yield Input(_text(source), source)
    else:
        known = "a folder, an image or video, a .txt with a path a line or a .parquet with a column of paths or bytes"
        raise InputError(f"{source}: {known} expected")


def _why_no_file(source: Path) -> str:
    try:
        source.stat()
    except FileNotFoundError:
        return "no such file or folder"
    except (OSError, ValueError) as error:  # a name too long or with a NUL, a forbidden folder
        return f"cannot be read: {getattr(error, 'strerror', None) or first_line(error)}"
    return "neither a folder nor a regular file"


def _media_in(folder: Path, left_out: Counter[str]) -> list[Path]:
    """Every image and video, by suffix, of a folder and its subfolders, linked ones included. Broken links and
    unreachable files are among them: they become errors. Other files are counted in `left_out`."""
    known, found = suffixes(), []
    for path in _files_in(folder):
        suffix = path.suffix.lower()
        if suffix in known and (os.path.isfile(path) or not os.path.exists(path)):
            found.append(path)
        else:
            left_out[suffix] += 1
    return sorted(found)


def _files_in(folder: Path) -> Iterator[Path]:
    """Every file in `folder` and its subfolders. A link to a folder above it, by real path, is not followed."""
    waiting = [(folder, os.path.realpath(folder), tuple[str, ...]())]  # path, real path, real paths above
    while waiting:
        current, real, above = waiting.pop()
        if real in above:
            continue
        try:
            entries = list(os.scandir(current))
        except OSError as error:
            if above and isinstance(error, FileNotFoundError):
                continue  # another job's unfinished shard, if its output is in this folder
            raise InputError(f"{current}: a folder that cannot be read: {first_line(error)}") from None
        for entry in entries:
            path = current / entry.name
            if os.path.isdir(path):  # False where permissions forbid the question
                below = os.path.realpath(path) if entry.is_symlink() else os.path.join(real, entry.name)
                waiting.append((path, below, (*above, real)))
            else:
                yield path


def _lines_of(source: Path) -> list[str]:
    with as_input_error(f"{source}: a list of paths in UTF-8 expected", OSError, UnicodeDecodeError):
        text = source.read_text(encoding="utf-8-sig")
    lines = [line.strip() for line in text.split("\n") if line.strip()]  # names may hold other line separators
    for line in lines:
        _check_no_url(line)
    return lines


def _check_no_url(path: str) -> None:
    if is_url(path):
        raise InputError(f"{path}: a URL; download it and give the file or its folder")


def _text(path: Path) -> str:
    """A path as an id: bytes of the name that are not UTF-8 are escaped."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _rows_of(table: Path) -> Iterator[Input]:
    import pyarrow.parquet

    content = _reading(table, lambda: table_digest(table))  # first: `_Table.check` finds what changes from here on
    schema = _reading(table, lambda: pyarrow.parquet.read_schema(table))
    column = _column_of(table, schema)
    wanted = [name for name in ("id", *PATHS) if name in schema.names][:1]
    for name in (column, *wanted):
        if schema.names.count(name) > 1:
            raise InputError(f"{table}: one column {name} expected, got {schema.names.count(name)}")
    _check_type(table, schema.field(column))
    called = _names_in(table, wanted[0]) if wanted else None
    for row in range(_reading(table, lambda: pyarrow.parquet.read_metadata(table)).num_rows):
        if called is None or called[row] is None:
            if wanted == ["id"]:
                raise InputError(f"{table}: an id of every row expected, got null in row {row}")
            yield Input(row_name(table, row), table, row, content)
        else:
            yield Input(str(called[row]), table, row, content)


def row_name(table: Path, row: int) -> str:
    """The id of a row that the table gives neither an id nor a path."""
    return f"{_text(table)}:{row}"


def _names_in(table: Path, column: str) -> list[Any]:
    """The values of a column that names rows."""
    import pyarrow.parquet

    values = _reading(table, lambda: pyarrow.parquet.read_table(table, columns=[column]))[column]
    found = attempted(lambda: list(values.to_pylist()))
    if isinstance(found, list):
        return found
    converted = enumerate(attempted(value.as_py) for value in values)
    # Arrow holds what Python cannot: other encodings, times out of range
    row, error = next((row, value) for row, value in converted if isinstance(value, Exception))
    raise InputError(f"{table}: column {column}: row {row} does not convert to Python: {first_line(error)}")


def _column_of(table: Path, schema: Any) -> str:
    """The column that holds the images and videos."""
    found = next((name for name in COLUMNS if name in schema.names), None)
    if found is None:
        raise InputError(f"{table}: a column of {', '.join(COLUMNS)} expected, got {sorted(set(schema.names))}")
    return found


def _check_type(table: Path, field: Any) -> None:
    """Refuses a column whose type can hold neither a file's contents nor a path."""
    import pyarrow

    kind = getattr(field.type, "storage_type", field.type)
    parts = [kind.field(i) for i in range(kind.num_fields)] if pyarrow.types.is_struct(kind) else []
    kinds = [part.type for part in parts if part.name in ("bytes", "path")] if parts else [kind]
    if not any(map(_may_name_a_file, kinds)):
        expected = "binary, string or a struct of bytes and path expected"
        raise InputError(f"{table}: column {field.name}: {expected}, got {str(field.type)[:80]}")


def _may_name_a_file(kind: Any) -> bool:
    """Whether values of an Arrow type, or of a dictionary type's values, are bytes or text."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    asked = "is_binary is_large_binary is_binary_view is_fixed_size_binary is_string is_large_string is_string_view"
    return any(getattr(types, name)(kind) for name in asked.split())


class _Table:
    """The contents of one table's column of files; one row group is in memory.

    Args:
        digest: the `table_digest` that the file must have as long as rows are read from it.
    """

    def __init__(self, path: Path, digest: str) -> None:
        import pyarrow.parquet

        self.path, self._digest = path, digest
        self._checked: tuple[int, ...] = ()  # the file's size and times when its digest was last compared
        self.check()
        self._file = _reading(path, lambda: pyarrow.parquet.ParquetFile(path))
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._ends = list(accumulate(groups))
        self._column = _column_of(path, self._file.schema_arrow)
        self._last: tuple[int, Any] = (-1, None)  # a group's number and values: one tuple, read by threads at once

    def check(self) -> None:
        """Raises InputError if the file holds other content than when it was listed."""
        found = _reading(self.path, self.path.stat)
        now = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        if now == self._checked:
            return
        digest = _reading(self.path, lambda: table_digest(self.path))
        if digest != self._digest:
            expected = f"{self.path}: the table that the job began with expected, got another"
            back = "put it back to go on, or choose another output folder"
            raise InputError(f"{expected} (digest {self._digest}, now {digest}); {back}")
        self._checked = now

    def content(self, row: int) -> Source:
        """A file's bytes, or its path relative to the table's folder; an error where the row holds neither."""
        values, first = self._group_of(row)
        value = attempted(lambda: content_of(values[row - first]))
        if isinstance(value, Exception):  # text that is not UTF-8, which Arrow does not check
            return MediaError(f"a file's bytes or path expected, got what does not convert: {first_line(value)}")
        if isinstance(value, str) and value:
            return value if is_url(value) else self.path.parent / value
        if value and isinstance(value, bytes):
            return NamedBytes(value, row_name(self.path, row))
        return MediaError("a file's bytes or path expected, got none")

    def _group_of(self, row: int) -> tuple[Any, int]:
        """The values of the group that holds a row, and its first row."""
        group = bisect_right(self._ends, row)
        known, values = self._last
        if known != group:
            try:
                read = functools.partial(self._file.read_row_group, group, columns=[self._column])
                values = _reading(self.path, read)[self._column]
            finally:  # also if it does not read: another table may have been written into the open file
                self.check()
            self._last = group, values
        return values, self._ends[group - 1] if group else 0


@functools.lru_cache(maxsize=1)
def _open_table(path: Path, digest: str) -> _Table:
    return _Table(path, digest)


def _reading(path: Path, read: Callable[[], Any]) -> Any:
    with as_input_error(f"{path}: no parquet file that reads"):  # pyarrow raises many types
        return read()
