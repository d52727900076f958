"""`fusedvit.Embedder`: images in, embeddings out, a batch of rows at a time or a corpus as a stream.

    embedder = fusedvit.Embedder("Qwen/Qwen3-VL-2B-Instruct")
    dataset.map(embedder, batched=True)  # Hugging Face datasets; Ray Data: map_batches(fusedvit.Embedder, …)

Decoding and resizing run ahead in threads and on the GPU (`fusedvit.pixels.stream`); a call encodes images of many
rows.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fusedvit.api import family_and_spec, fuse
from fusedvit.checks.find_tower import find_tower
from fusedvit.config import FuseConfig, takes_config
from fusedvit.cores import available_cores
from fusedvit.corpus import origin, shards
from fusedvit.corpus.job import Job
from fusedvit.corpus.loading import check_model, check_options, device_and_dtype, loaded, processors_of
from fusedvit.corpus.shards import Embedded
from fusedvit.corpus.values import (
    COLUMNS,
    as_many,
    check_many,
    checked_names,
    columns_of,
    image_of,
    source_of,
    with_columns,
)
from fusedvit.errors import first_line, unnamed
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.pixels.ahead import pool_of, raise_met, started_ahead, until_error
from fusedvit.pixels.media import Limits, MediaError, Source, decoders, each_of
from fusedvit.pixels.processors import check_fits
from fusedvit.pixels.streaming import Batch, frames_of, stream

PATCHES = 65536  # per call of the tower: some 80 images of 448 x 448
ENCODED = 16  # images per call of `encode`
DECODED = 64  # decoded images that may wait for `encode`

Encode = Callable[[Any, Any, list[Any]], Any]


class Embedder:
    """A callable `(batch: dict) -> dict` for Ray Data's `map_batches` and `datasets.map(batched=True)`. In Daft's batch
    functions it takes columns directly: `embedder({"path": series})["embedding"]`. It maps Arrow tables to Arrow
    tables.

    A batch is a dictionary of columns. The first column present of `image`, `bytes`, `path`, `file` and `image_path` is
    read. It holds paths, contents of files, {"bytes": …, "path": …} as `datasets` stores images, Pillow images, or
    uint8 pixels `[H, W, 3]`: arrays as `ray.data.read_images` returns them, or tensors in a column of Arrow's or Ray's.
    These columns are added:

        embedding   [out] fp32, the mean of an image's tokens; or [tokens, width] with `output="tokens"`
        grid_thw    (frames, rows, columns) in patches; zeros on an error
        error       "", or what is wrong with this row, non-finite outputs of the tower included. The row's embedding is
                    then NaN (or has no tokens); other rows are not affected

    Args:
        model: a checkpoint (a folder or a hub name), or a Hugging Face model or tower.
        processor: the image processor, or a processor that holds one; by default the checkpoint's.
        output: "mean" or "tokens".
        deepstack: appends the tower's deepstack features to tokens (or to their mean): width (1 + n) * out.
        encode: `encode(model, processor, images)` -> `[n, d]` or n tensors `[t, d]`, for models with an embedding of
            their own (Qwen3-VL-Embedding, ColQwen). It gets the whole model with its tower fused, the processor, and at
            most 16 Pillow images. All its calls must return vectors of one width, or all `[t, d]` of one d. An image
            for which it raises ValueError when called with that image alone becomes a row with an error; if it raises
            for every image of its first call, the error is raised. `output` and `deepstack` are ignored.
        device, dtype: the device and dtype in which a checkpoint is loaded: by default a GPU and bf16 if there is one,
            else the CPU and fp32.
        threads: how many threads decode; by default one per core.
        limits: limits on bytes, pixels and frames of each file.
        config: as for `fuse`; by default `FuseConfig(compile="now")`.

    Raises:
        InputError, UnsupportedModel: the checkpoint does not load, or has no tower that can be fused; the processor
            cuts other patches than the tower's, or cannot return bytes.
        ValueError, TypeError: an invalid option; a model without its processor.
    """

    @takes_config
    def __init__(
        self,
        model: str | Path | nn.Module,
        processor: Any = None,
        *,
        output: str = "mean",
        deepstack: bool = False,
        encode: Encode | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        threads: int | None = None,
        limits: Limits | None = None,
        config: FuseConfig | None = None,
    ) -> None:
        check_model(model, processor, encode)
        check_options(output, deepstack, threads, limits, config)
        self._model = loaded(model, *device_and_dtype(model, device, dtype))
        self._processor = processors_of(str(model)) if processor is None else processor
        self._handle = _fused(self._model, config, None if encode else self._processor)
        self._output, self._deepstack, self._encode = output, deepstack, encode
        self._threads, self._limits = threads, limits
        self._answer = None if encode else _Answer(output == "tokens", self.width)  # until `encode` has been called
        parameter = next(find_tower(self._model).parameters())
        self._device, self.dtype = parameter.device, torch.float32 if output == "mean" else parameter.dtype
        self._patches, self._waited, self._tower_seconds = 0, 0.0, 0.0

    def __getstate__(self) -> dict[str, Any]:
        """What the embedder was built with: `datasets` finds results in its cache by a hash of the pickled state, which
        calls must not change."""
        answer = None if self._encode else self._answer
        return vars(self) | {"_patches": 0, "_waited": 0.0, "_tower_seconds": 0.0, "_answer": answer}

    @property
    def handle(self) -> FusedEncoder:
        """The tower's handle, which `fuse` returns."""
        return self._handle

    def __repr__(self) -> str:
        rows = "rows of encode" if self._encode else f"{self._output}, {self.width} channels"
        return f"<Embedder of {type(self._model).__name__}: {rows}; {self._handle!r}>"

    @property
    def width(self) -> int:
        """Channels of a row, without `encode`."""
        spec = self._handle.spec
        return spec.out_size * (1 + len(spec.deepstack) * self._deepstack)

    def counters(self) -> dict[str, float]:
        """Counts since the embedder was built: patches, the tower's seconds (on a GPU, GPU time), the seconds in which
        the tower waited for pixels, and the share of padding in the graphs' replays."""
        graphs = self._handle.stats().get("graphs") or {}
        return {
            "patches": self._patches,
            "tower_seconds": self._tower_seconds,
            "waited_seconds": self._waited,
            "padding": graphs.get("padding", 0.0),
        }

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with the columns `embedding`, `grid_thw` and `error`.

        Raises:
            ValueError: the batch has no column to read, or two of the same name; or `encode` returns another shape than
                in its first call, or refuses the plain image that it is tried with if no row reached it.
            TypeError: the batch has no columns; or the column holds one row's value, as in calls without batches.
        """
        names = columns_of(batch)
        column = next((name for name in COLUMNS if name in names), None)
        if column is None:
            raise ValueError(f"fusedvit: a column of {', '.join(COLUMNS)} expected, got {names[:20]}")
        if names.count(column) > 1:
            raise ValueError(f"fusedvit: one column {column} expected, got {names.count(column)}")
        check_many(column, batch[column])
        found = list(self.embed(map(source_of, batch[column])))
        several = self._known_answer().several
        added: dict[str, list[Any]] = {
            "embedding": [self._array(each) for each in found],
            "grid_thw": [list(each.grid_thw) for each in found],
            "error": [each.error for each in found],
        }
        return with_columns(batch, added, several)

    def embed(self, sources: Source | Iterable[Source], names: Sequence[str] | None = None) -> Iterator[Embedded]:
        """The result for each source, in their order; the next sources are decoded and computed meanwhile.

        Args:
            sources: one source or several, as `fusedvit.pixels.load` takes them: paths, contents of files, or pixels;
                endless iterables are fine.
            names: ids of the sources, one for each; by default their numbers.

        Raises:
            TypeError: `sources` is neither a source nor several, or `names` is no list of strings.
            ValueError: fewer or more names than sources.
            InputError: the machine fails. Errors of iterating `sources` are passed on. Earlier results come first.
        """
        names = None if names is None else checked_names(names)
        given = each_of(sources)
        return self._embed(given if names is None else as_many(given, len(names), sources), names)

    def _embed(self, sources: Iterable[Source], names: Sequence[str] | None) -> Iterator[Embedded]:
        found: dict[int, Embedded] = {}
        done = 0
        for part in self._encoded(sources) if self._encode else self._streamed(sources):
            found |= part
            while done in found:
                each = found.pop(done)
                name = str(done) if names is None else names[done]
                yield Embedded(name, each.rows, each.grid_thw, each.error)
                done += 1

    def _streamed(self, sources: Iterable[Source]) -> Iterator[dict[int, Embedded]]:
        """The tower's own rows. A batch is fetched from the GPU after the next one has been started."""
        failed: dict[int, Embedded] = {}

        def note(error: MediaError) -> None:
            failed[error.index] = Embedded("", None, error=unnamed(error))

        waiting: _Started | None = None
        batches = stream(
            sources, self._processor, self._device, PATCHES, self._threads, limits=self._limits, errors=note
        )
        asked = time.perf_counter()
        met: list[Exception] = []
        for batch in until_error(batches, met):
            self._waited += time.perf_counter() - asked
            started = self._start(batch)
            if waiting is not None:
                yield self._fetched(waiting)
            waiting = started
            yield {index: failed.pop(index) for index in list(failed)}
            asked = time.perf_counter()
        if waiting is not None:
            yield self._fetched(waiting)
        yield failed
        raise_met(met)

    def _start(self, batch: Batch) -> "_Started":
        """Runs the tower on `batch`; the GPU may still be computing the rows."""
        begin = _mark(self._device)
        with torch.inference_mode():
            rows = self._handle.concatenated(batch.pixel_values, batch.grid_thw)[:, : self.width]
            counts = batch.grid_thw.prod(1) // self._handle.spec.merge_unit
            if self._output == "mean":
                # Neither the copy nor a check of `lengths` may wait for the GPU, which packs the next images meanwhile.
                lengths = counts.to(rows.device, non_blocking=True)
                rows = torch.segment_reduce(rows.float(), "mean", lengths=lengths, axis=0, unsafe=True)
                counts = torch.ones_like(counts)
            finite = rows.isfinite().all(1)
        return _Started(batch, rows, finite, counts.tolist(), begin, _mark(self._device))

    def _fetched(self, started: "_Started") -> dict[int, Embedded]:
        batch = started.batch
        parts = _on_host(started.rows, started.end).split(started.counts)
        finite = _on_host(started.finite, started.end).split(started.counts)
        self._tower_seconds += _between(started.begin, started.end)
        self._patches += int(batch.grid_thw.prod(1).sum())
        grids = [(int(t), int(h), int(w)) for t, h, w in batch.grid_thw.tolist()]
        found = zip(batch.indices, parts, finite, grids, strict=True)
        return {index: _embedded(part, flags, grid) for index, part, flags, grid in found}

    def _encoded(self, sources: Iterable[Source]) -> Iterator[dict[int, Embedded]]:
        """The rows of `encode`, called with `ENCODED` images at a time."""
        ready: dict[int, Any] = {}
        met: list[Exception] = []
        for index, image in enumerate(until_error(self._images(sources), met)):
            if isinstance(image, MediaError):
                yield {index: Embedded("", None, error=unnamed(image))}
                continue
            ready[index] = image
            if len(ready) == ENCODED:
                yield self._encode_all(ready)
                ready = {}
        if ready:
            yield self._encode_all(ready)
        raise_met(met)

    def _images(self, sources: Iterable[Source]) -> Iterator[Any]:
        """Each source as a Pillow image, or its error; decoded ahead in threads."""
        loads = (functools.partial(image_of, source, self._limits, i) for i, source in enumerate(sources))
        with pool_of(self._threads or available_cores(), "fusedvit-decode") as pool:
            for task in started_ahead(pool, loads, DECODED):
                yield task.result()

    def _encode_all(self, images: dict[int, Any]) -> dict[int, Embedded]:
        """The rows of `encode` for `images`. If it refuses them, each is tried alone, and a refused one is an error."""
        assert self._encode is not None
        try:
            with torch.inference_mode():
                found = self._encode(self._model, self._processor, list(images.values()))
        except ValueError as error:  # processors raise it for an image that they refuse
            if len(images) > 1:
                alone = {i: self._encode_all({i: image})[i] for i, image in images.items()}
                if self._answer is None and all(each.error for each in alone.values()):
                    raise  # `encode` has never succeeded: the fault is not the images'
                return alone
            return dict.fromkeys(images, Embedded("", None, error=f"encode= refuses it: {first_line(error)}"))
        rows = _rows_of(found, len(images))
        answer = _Answer(rows[0].ndim > 1, rows[0].shape[-1])
        if self._answer not in (None, answer):  # else rows of an image would be lost, or widths would differ
            raise ValueError(f"fusedvit: encode must return {self._answer} of each image, as before, got {answer}")
        self._answer = answer
        parts = [each.reshape(-1, each.shape[-1]) for each in rows]
        return {i: _embedded(each, each.isfinite().all(1)) for i, each in zip(images, parts, strict=True)}

    def _known_answer(self) -> "_Answer":
        """The shape of an image's embedding; if `encode` has returned none yet, it is called with a plain image."""
        if self._answer is None:
            refused = self._encode_all({0: _plain_image()})[0].error
            if self._answer is None:
                raise ValueError(f"fusedvit: encode must return an embedding of a plain image, got {refused}")
        return self._answer

    def _array(self, each: Embedded) -> np.ndarray:
        """`[width]`; or `[n, width]` for tokens, and where `encode` returns several vectors per image."""
        several, width = self._known_answer()
        if each.rows is None:
            return np.empty((0, width), np.float32) if several else np.full(width, np.nan, np.float32)
        array: np.ndarray = each.rows.float().numpy()
        return array if several else array[0]


def embedder_of(job: Job) -> Embedder:
    """The embedder of a job that has begun, on `job.device` or the visible GPU.

    Raises:
        InputError, UnsupportedModel: as `Embedder`; or the checkpoint is no longer the one that the job began with.
    """
    embedder = Embedder(job.model, output=job.output, deepstack=job.deepstack, device=job.device)
    # After loading: an actor of Ray's may start, or start again, hours after the job.
    shards.check(Path(job.out), origin.checkpoint(job.model), part=True)
    return embedder


class _Answer(NamedTuple):
    """The shape of an image's embedding: one vector or several, of `width` channels."""

    several: bool
    width: int

    def __str__(self) -> str:
        return f"[t, {self.width}]" if self.several else f"[{self.width}]"


class _Started(NamedTuple):
    """A call of the tower: its rows, which of them are finite, how many belong to each input, and when it began and
    ended (`_mark`)."""

    batch: Batch
    rows: torch.Tensor
    finite: torch.Tensor
    counts: list[int]
    begin: Any
    end: Any


def _embedded(rows: torch.Tensor, finite: torch.Tensor, grid_thw: tuple[int, int, int] = (0, 0, 0)) -> Embedded:
    """An input's rows on the CPU; an error where some of them are not finite, as NaN marks errors."""
    bad = int((~finite).sum())
    if bad:
        return Embedded("", None, error=f"no finite embedding: {bad} of {len(rows)} rows hold NaN or infinity")
    return Embedded("", rows, grid_thw)


@decoders()
def _plain_image() -> Any:
    """An image that any `encode` should accept."""
    from PIL import Image

    return Image.new("RGB", (224, 224), (128, 128, 128))


def _mark(device: torch.device) -> Any:
    """A point in time: an event on the GPU's current stream, or the CPU's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _on_host(rows: torch.Tensor, end: Any) -> torch.Tensor:
    """`rows`, complete at `end`, on the CPU. A stream of its own copies them: on the current one the copy would wait
    for all that was launched since."""
    if not rows.is_cuda:
        return rows
    stream = _copying_stream(rows.device)
    stream.wait_event(end)
    with torch.cuda.stream(stream):
        return rows.cpu()


@functools.cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _between(begin: Any, end: Any) -> float:
    """Seconds from `begin` to `end`; the GPU must have passed both."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


def _fused(model: nn.Module, config: FuseConfig | None, processor: Any) -> FusedEncoder:
    """Fuses the tower and returns its handle. If this fails, or the patches of `processor` do not fit, the tower and
    its options stay as they were; a `processor` of None is not checked."""
    if processor is not None:
        frames_of(processor)  # raises if it cannot return bytes
    _, spec = family_and_spec(find_tower(model))
    check_fits(processor, spec)
    return fuse(model, FuseConfig(compile="now") if config is None else config)


def _rows_of(found: Any, count: int) -> list[torch.Tensor]:
    """The result of `encode` on the CPU: a vector or `[t, d]` per image. Raises ValueError or TypeError for anything
    else."""
    got = len(found) if hasattr(found, "__len__") else type(found).__name__
    if got != count:
        raise ValueError(f"fusedvit: encode must return {count} embeddings for as many images, got {got}")
    rows = list(map(_as_real, found))
    ndim, width = rows[0].ndim, rows[0].shape[-1] if rows[0].ndim else 0
    if ndim > 2 or not width or any((r.ndim, r.shape[-1]) != (ndim, width) for r in rows):
        shapes = ", ".join(sorted({str(tuple(row.shape)) for row in rows}))
        raise ValueError(f"fusedvit: encode must return [n, d] or n tensors [t, d], got tensors of {shapes}")
    return rows


def _as_real(each: Any) -> torch.Tensor:
    """An embedding that `encode` returned, as a tensor on the CPU. Raises TypeError if it is none of real numbers."""
    try:
        found = torch.as_tensor(each).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"{type(each).__name__} ({first_line(error)})"
        raise TypeError(f"fusedvit: encode must return tensors of real numbers, got {got}") from None
    if found.is_complex():
        raise TypeError(f"fusedvit: encode must return tensors of real numbers, got {found.dtype}")
    return found
