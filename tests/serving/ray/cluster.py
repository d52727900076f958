"""A Ray cluster of one test: `python cluster.py shards | rows | elsewhere | deadly MODEL PICTURES OUT`, on CPUs."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch

import fusedvit
from fusedvit.corpus.job import Job, begun
from fusedvit.errors import InputError
from fusedvit.serving import ray as on_ray
from fusedvit.serving.ray import embed


def shards(model: str, pictures: str, out: str) -> None:
    """Two actors with the tower, one that decodes; a shard's line when it is committed."""
    job = Job(model, (pictures,), out, shard_size=32)
    embed(job, actors=2, decoders=1, gpus=0, done=lambda shard: print(json.dumps(shard), flush=True))


def elsewhere(model: str, pictures: str, out: str) -> None:
    """Names that lead on from the driver's folder, on a cluster that was started in another; then a shard that cannot
    be written, which Ray is told to leave out."""
    os.chdir(Path(pictures).parent)
    given = Path(pictures).name
    for shard in embed(Job(model, (given,), out, shard_size=4), actors=1, decoders=1, gpus=0):
        print(json.dumps(shard), flush=True)
    job = Job(model, (given,), f"{out}-2", shard_size=4)
    with begun(job, torch.float32):
        pass  # without an error: it stays
    in_the_way = Path(job.out, "shard-00001")
    in_the_way.mkdir()
    (in_the_way / "notes").touch()
    ray.data.DataContext.get_current().max_errored_blocks = -1
    try:
        embed(job, actors=1, decoders=1, gpus=0)
    except InputError as error:
        print(json.dumps({"error": str(error)}), flush=True)


def deadly(model: str, pictures: str, out: str) -> None:
    """A shard of which each actor dies, as of a lack of memory; a dot in a file for each."""

    class Decoder:
        def __init__(self, model: str) -> None:
            pass

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            with Path(f"{out}-deaths").open("a") as file:
                file.write(".")
            os.kill(os.getpid(), signal.SIGKILL)
            return row

    on_ray._Decoder = Decoder  # type: ignore[assignment, misc]
    embed(Job(model, (pictures,), out, shard_size=4000), actors=1, decoders=1, gpus=0)


def rows(model: str, pictures: str, out: str) -> None:
    """`Embedder` as Ray Data takes it: each row's path, first number and error."""
    images = ray.data.read_images(pictures, mode="RGB", include_paths=True)
    found = images.map_batches(
        fusedvit.Embedder,
        fn_constructor_args=(model,),
        batch_size=32,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    for row in found.take_all():
        print(json.dumps([row["path"], float(row["embedding"][0]), row["error"]]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # sockets need a short name
        ray.init(num_cpus=4, include_dashboard=False, logging_level="warning", log_to_driver=False, _temp_dir=folder)
        try:
            {"shards": shards, "rows": rows, "elsewhere": elsewhere, "deadly": deadly}[sys.argv[1]](*sys.argv[2:])
        finally:
            ray.shutdown()
