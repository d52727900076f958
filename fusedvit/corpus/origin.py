"""Digests of what a job's results depend on besides its inputs' names: the checkpoint, and the files and tables.

Weights are identified by the header of each file and a sample of every tensor in it: this takes milliseconds for
gigabytes, and training changes all of a tensor. A copy of a checkpoint on another host or of another time has the same
digest.
"""

import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fusedvit.checkpoint import ADAPTER, tower_config
from fusedvit.corpus import samples
from fusedvit.corpus.inputs import Input, row_name
from fusedvit.errors import as_input_error, from_json

CONFIG = "config.json"
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin")
_NAMED = 8  # of a job's inputs as given, in its document
_LONGEST_HEAD = 100 * 2**20  # bytes of a safetensors header, the limit of its own library


def checkpoint(where: str) -> dict[str, str]:
    """What identifies a checkpoint: digests of a folder's config, weights and processor, or the commit of a repository
    on the hub.

    Raises:
        InputError: there is no such checkpoint, or one of its files cannot be read.
        UnsupportedModel: the repository has no tower that can be fused.
    """
    folder = Path(where)
    if not folder.is_dir():
        return {"checkpoint": _commit_of(where)}
    with as_input_error(f"{where}: a checkpoint that cannot be read", OSError):
        weights = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
        return {
            "config": samples.digest(_document(folder / name) for name in (CONFIG, ADAPTER)),
            "processor": samples.digest(_document(folder / name) for name in PROCESSORS),
            "weights": samples.digest(part for path in weights for part in _weights(path)),
        }


def tables(inputs: Iterable[Input]) -> str:
    """A digest of the tables whose inputs are named by a row's number only; "" without any."""
    numbered = {each.path: each.table for each in inputs if each.row >= 0 and each.id == row_name(each.path, each.row)}
    return samples.digest(table.encode() for table in numbered.values()) if numbered else ""


def files(inputs: Iterable[Input]) -> str:
    """A digest of the inputs apart from their names: the real path of each file, and the real path and content of each
    table."""
    folder, tables = functools.cache(_real), set[Path]()  # each folder is resolved once, as many files share it

    def real(path: Path) -> bytes:
        given, name = os.path.split(path)
        found = os.path.join(folder(given or "."), name)
        return os.fsencode(_real(found) if name == ".." or os.path.islink(found) else found)

    def parts() -> Iterator[bytes]:
        for each in inputs:
            if each.row < 0:
                yield real(each.path)
                continue
            if each.path not in tables:
                tables.add(each.path)
                yield real(each.path)
                yield each.table.encode()
            yield each.row.to_bytes(8, "little")

    return samples.digest(parts())


def _real(path: str) -> str:
    """`os.path.realpath(path)`, or `path` itself if no file system allows the name: that becomes the row's error."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return path


def given(sources: Sequence[str]) -> list[str]:
    """Real paths of the first of the job's folders, files, lists and tables, for messages."""
    return [os.fsencode(_real(each)).decode("utf-8", "backslashreplace") for each in sources[:_NAMED]]


def working_directory(given: Sequence[str]) -> str:
    """The folder to which paths of inputs are relative; "" if all are absolute."""
    return "" if all(os.path.isabs(each) for each in given) else os.getcwd()


def _commit_of(where: str) -> str:
    """A repository's commit: the name of its folder in the hub's cache."""
    from transformers.utils import cached_file

    tower_config(where)  # raises the better message for a wrong name
    with as_input_error(f"{where}: no config that transformers reads"):  # OSError, and the hub's if it is not reached
        found = cached_file(where, CONFIG)
    return "" if found is None else Path(found).parent.name


def _document(path: Path) -> bytes:
    """A JSON file's content without its formatting; b"" if there is no such file."""
    if not path.is_file():
        return b""
    content = path.read_bytes()
    try:
        return json.dumps(from_json(content), sort_keys=True).encode()
    except ValueError:  # no JSON: loading the checkpoint raises the error
        return content


def _weights(path: Path) -> Iterator[bytes]:
    """Parts of a file of weights: its name and header, and samples of each tensor."""
    if path.suffix == ".json":
        yield from (path.name.encode(), _document(path))
        return
    yield path.name.encode()
    with path.open("rb") as file:
        head = _head_of(file) if path.suffix == ".safetensors" else b""
        bounds = _bounds_in(head)
        if bounds is None:
            yield from samples.of_file(path)
            return
        yield head
        for begin, end in bounds:
            yield samples.sample(file, 8 + len(head) + begin, 8 + len(head) + end)


def _head_of(file: BinaryIO) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    return file.read(length) if length <= _LONGEST_HEAD else b""


def _bounds_in(head: bytes) -> list[tuple[int, int]] | None:
    """The bounds of tensors, ascending, relative to the end of a safetensors header; None if `head` is no header."""
    try:
        described: dict[str, Any] = from_json(head)
        found = [each["data_offsets"] for name, each in described.items() if name != "__metadata__"]
        return sorted((int(begin), int(end)) for begin, end in found)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
