"""A corpus on a Ray cluster: actors on CPUs decode; one actor per GPU runs the tower and commits whole shards.

    embed(Job("Qwen/Qwen3-VL-2B-Instruct", ("pictures",), "OUT", shard_size=64), actors=8, decoders=64)

Ray keeps actors alive, repeats the unfinished work of dead ones, up to `DEATHS`, and bounds the queue between them.
That each input is written once does not depend on Ray: a shard holds fixed inputs and its rename commits it, however
often it is repeated. The folder has the layout of `fusedvit embed`; either program continues the other's job. Every
node must see the inputs and the folder.
"""

import functools
import os
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusedvit.checkpoint import default_dtype
from fusedvit.corpus import shards
from fusedvit.corpus.embedder import Embedder, embedder_of
from fusedvit.corpus.inputs import Input, sources
from fusedvit.corpus.job import Job, begun, check_count
from fusedvit.corpus.loading import processors_of
from fusedvit.errors import InputError, UnsupportedModel, first_line, shown
from fusedvit.pixels.media import Media, MediaError, Source, VideoFacts, load_one
from fusedvit.pixels.streaming import frames_of

Row = dict[str, Any]
DEATHS = 5  # of actors at the same shard, for want of memory for example, that end a job


def embed(
    job: Job,
    actors: int = 1,
    decoders: int = 4,
    gpus: float = 1,
    done: Callable[[Row], object] = lambda shard: None,
) -> list[Row]:
    """Embeds the shards that are not committed yet, on the cluster that `ray.init` has started or joined.

    Relative paths start from this process's working directory.

    Args:
        job: all pixels of a shard wait in Ray's object store at once, 3 bytes a pixel: 64 is a good `shard_size`.
            `device` is ignored: an actor takes the GPU that Ray gives it.
        actors: actors that run the tower, on `gpus` GPUs each; with `gpus=0` on one CPU each.
        decoders: the most actors that decode, on one CPU each; Ray starts as many as keep up.
        done: called with each shard that this call commits: {"number", "inputs", "errors"}.

    Returns:
        All arguments of `done`: the shards that this call has committed, save one whose actor died before it told.
        `job.totals` counts those of every call.

    Raises:
        InputError: a wrong option, an error that `fusedvit embed` ends with, a shard at which actors die again and
            again, or shards that did not come back. Committed shards stay.
    """
    check_count("actors", actors)
    check_count("decoders", decoders)
    if not (isinstance(gpus, int | float) and (0 <= gpus <= 1 or (gpus > 1 and gpus == int(gpus)))):
        raise InputError(f"gpus: 0 for a CPU, a part of a GPU or a whole number of them expected, got {shown(gpus)}")
    job.check()
    _absolute(job).check()  # with the paths that actors get
    found: list[Row] = []

    def heard(row: Row) -> None:
        if row.pop("committed"):  # else another run was faster
            found.append(row)
            done(row)

    on = "cuda" if gpus else "cpu"
    with begun(job, default_dtype(torch.device(on))) as (parts, todo):
        if todo:
            _run(_absolute(replace(job, device=on)), parts, todo, (actors, decoders, gpus), heard)
        missing = set(todo) - {row["number"] for row in found} - shards.committed(Path(job.out))
        if missing:
            raise InputError(
                f"{job.out}: {len(missing)} of {len(todo)} shards did not come back: {str(sorted(missing))[:200]}; Ray "
                "drops what fails up to DataContext.max_errored_blocks, and its log says why; start again for the rest"
            )
    return found


def _absolute(job: Job) -> Job:
    """The job with absolute paths: an actor's working directory is not the driver's."""
    model = os.path.abspath(job.model) if os.path.isdir(job.model) else job.model
    return replace(job, model=model, out=os.path.abspath(job.out))


def _run(
    job: Job,
    parts: Sequence[Sequence[Input]],
    todo: Sequence[int],
    resources: tuple[int, int, float],
    heard: Callable[[Row], None],
) -> None:
    """Embeds the shards `todo`; `resources` are the tower's actors, decoding actors, and GPUs per tower's actor."""
    import ray.data
    import ray.exceptions

    actors, decoders, gpus = resources
    rows = [
        {"number": n, "given": pickle.dumps([replace(each, path=each.path.absolute()) for each in parts[n]])}
        for n in todo
    ]
    decoding = {"compute": ray.data.ActorPoolStrategy(min_size=1, max_size=decoders), "num_cpus": 1}
    on_gpus = {"compute": ray.data.ActorPoolStrategy(size=actors), "num_cpus": 0 if gpus else 1, "num_gpus": gpus}
    again = {"max_task_retries": DEATHS - 1}  # Ray's own default has no end
    dataset = (
        ray.data.from_items(rows, override_num_blocks=len(rows))
        .map(_Decoder, fn_constructor_args=(job.model,), **decoding, **again)
        .map(_Tower, fn_constructor_args=(job,), **on_gpus, **again)
    )
    try:
        for row in dataset.iter_rows():
            heard(row)
    except ray.exceptions.RayTaskError as error:
        message = _message_in(error)
        if not message:
            raise
        raise InputError(message) from error
    except ray.exceptions.RayActorError as error:
        said = f"actors died, as they were created or {DEATHS} times at the same shard: {first_line(error)}"
        raise InputError(said) from error


def _message_in(error: Exception) -> str:
    """The message of our error that an actor raised, from the traceback's text, which is all that Ray passes; else "".

    An actor raises its error rather than return it. Returned, it would end the iteration early, and the threads that
    the iteration leaves behind end the process when they meet `ray.shutdown`, perhaps before the error is printed.
    """
    ours = "|".join(rf"{kind.__module__}\.{kind.__qualname__}" for kind in (InputError, UnsupportedModel))
    raised = re.findall(rf"^(?:{ours}): (.*)$", str(error), re.MULTILINE)
    return str(raised[-1]) if raised else ""


class _Decoder:
    """An actor on a CPU: decodes the inputs of a shard to pixels."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __call__(self, row: Row) -> Row:
        return row | {"pixels": pickle.dumps([self._decoded(each) for each in sources(pickle.loads(row["given"]))])}

    def _decoded(self, source: Source) -> Media | MediaError:
        try:
            return load_one(source, lambda facts: self._frames(facts))
        except MediaError as error:
            return error

    @functools.cached_property
    def _frames(self) -> Callable[[VideoFacts], Sequence[int]]:
        """Chooses frames of a video; built at the first one, since images need no transformers."""
        return frames_of(processors_of(self._model))


class _Tower:
    """An actor on a GPU: embeds the pixels of a shard and commits the shard."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, row: Row) -> Row:
        out = Path(self._job.out)
        with shards.in_use(out):  # the driver of a failed job leaves the folder to actors still at work
            rows = self._embedder.embed(pickle.loads(row["pixels"]))
            found = [replace(each, id=given.id) for each, given in zip(rows, pickle.loads(row["given"]), strict=True)]
            committed = shards.commit(out, row["number"], found, self._embedder.width, self._embedder.dtype)
        errors = sum(bool(each.error) for each in found)
        return {"number": row["number"], "inputs": len(found), "errors": errors, "committed": committed}

    @functools.cached_property
    def _embedder(self) -> Embedder:
        """Built by the first shard: Ray would restart an actor that raises in its constructor, over and over."""
        if self._job.device == "cuda" and not torch.cuda.is_available():
            raise InputError("an actor that Ray gave a GPU: torch sees none there; gpus=0 runs the job on CPUs")
        return embedder_of(self._job)
