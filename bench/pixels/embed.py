"""`fusedvit embed` on a corpus of JPEGs against a plain loop over Hugging Face's processor and tower; on two GPUs, a
corpus against one GPU's time, and a long video through `DataParallelEncoder`.

    python -m fusedvit.bench.pixels.embed --images 5000 --json embed.json
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fusedvit
from fusedvit.bench.pixels.corpus import chunks, jpegs
from fusedvit.bench.pixels.table import processor_for
from fusedvit.bench.records import arguments, need_gpus, passport, run_program, write
from fusedvit.bench.timing import latency
from fusedvit.bench.towers import GEOMETRIES, build_one, pixels_for, random_weights_
from fusedvit.corpus import job as corpus_job
from fusedvit.corpus.embedder import embedder_of
from fusedvit.corpus.job import Job, ShardDone

SIDE, TARGET = 600, 448  # pixels on a side: of the files, and of the images that the tower gets
HF_BATCH, HF_SECONDS = 16, 12.0
SHARD = 128
VIDEO = [(64, 28, 28)]  # frames, and rows and columns of patches
BUSY, IMAGES_OF_HF, TWO_GPUS, VIDEO_OF_ONE = 0.8, 3.0, 1.9, 1.7  # bars


def checkpoint(folder: Path, name: str) -> Path:
    """Writes a checkpoint with the tower `name`, random weights, a one-layer small language model, and a processor."""
    import transformers

    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 200}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=dict(GEOMETRIES[name].numbers))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    random_weights_(model, device=next(model.parameters()).device)
    model.save_pretrained(folder)
    patch = config.vision_config.patch_size
    processor_for(TARGET, patch).save_pretrained(folder)
    return folder


def hugging_face(model: Path, files: Sequence[Path], device: torch.device) -> float:
    """Images a second of a plain loop over batches of 16: open, process, move, encode, average."""
    import transformers
    from PIL import Image

    processor = transformers.AutoImageProcessor.from_pretrained(model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    whole = transformers.Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=dtype)
    tower = whole.model.visual.eval().to(device)

    def encode(batch: Sequence[Path]) -> None:
        given = processor(images=[Image.open(path).convert("RGB") for path in batch], return_tensors="pt").to(device)
        with torch.inference_mode():
            rows = tower(given["pixel_values"].to(dtype), grid_thw=given["image_grid_thw"]).pooler_output
        counts = (given["image_grid_thw"].prod(1) // tower.spatial_merge_size**2).tolist()
        for part in rows.split(counts):
            part.float().mean(0).cpu()

    encode(files[:HF_BATCH])
    start, done = time.perf_counter(), 0
    for batch in chunks(files, HF_BATCH):
        encode(batch)
        done += len(batch)
        if time.perf_counter() - start > HF_SECONDS:
            break
    return done / (time.perf_counter() - start)


def embed(model: Path, files: Path, out: Path, gpus: Sequence[int]) -> dict[str, Any]:
    """The figures of one run of `fusedvit embed`; images a second count from the first to the last commit."""
    commits: list[tuple[float, ShardDone]] = []
    job = Job(str(model), (str(files),), str(out), shard_size=SHARD)
    start = time.perf_counter()
    corpus_job.run(job, gpus, embedder_of, lambda shard, total: commits.append((time.perf_counter(), shard)))
    first, last = commits[0][0], commits[-1][0]
    later = sum(shard.inputs for _, shard in commits[1:])
    seconds = max(shard.seconds for _, shard in commits)
    workers = max(1, len(gpus))
    return {
        "gpus": workers,
        "images_per_s": later / (last - first) if later else 0.0,
        "images": sum(shard.inputs for _, shard in commits),
        "errors": sum(shard.errors for _, shard in commits),
        "wall_s": last - start,
        "first_commit_s": first - start,
        "tower_busy": sum(shard.tower_seconds for _, shard in commits) / seconds / workers,
        "waited_for_pixels": sum(shard.waited_seconds for _, shard in commits) / seconds / workers,
        "shards": [asdict(shard) for _, shard in commits],
    }


def video(name: str, devices: Sequence[str]) -> dict[str, Any]:
    """Milliseconds of a call with one long video, on all devices and on the first alone, and their largest difference
    in outputs."""
    first = torch.device(devices[0])
    dtype = torch.bfloat16 if first.type == "cuda" else torch.float32
    tower = build_one(GEOMETRIES[name], dtype, first)
    pixels, grid = pixels_for(tower, VIDEO), torch.tensor(VIDEO)
    config = fusedvit.FuseConfig(compile="now")
    several = fusedvit.DataParallelEncoder(tower, devices, config)
    one = fusedvit.fuse(tower)
    with torch.inference_mode():
        difference = (several(pixels, grid) - one.concatenated(pixels, grid)).abs().max().item()
        calls = {"one": lambda: one.concatenated(pixels, grid), "several": lambda: several(pixels, grid)}
        found = {name: asdict(spread) for name, spread in latency(calls, first, 4.0).items()}
    return {"frames": VIDEO[0][0], "ms": found, "devices": len(devices), "greatest_difference": difference}


def _judged(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each figure with its bar, and whether the bar is met."""
    one, two = found.get("one"), found.get("two")
    figures = {}
    if one and "hugging_face" in found:
        figures["images a second over Hugging Face's loop"] = one["images_per_s"] / found["hugging_face"], IMAGES_OF_HF
        figures["share of the time that the tower runs"] = one["tower_busy"], BUSY
    if one and two:
        figures["images a second of two GPUs over one"] = two["images_per_s"] / one["images_per_s"], TWO_GPUS
    if "video" in found:
        times = found["video"]["ms"]
        figures["a 64-frame video on one GPU over several"] = (
            times["one"]["median"] / times["several"]["median"],
            VIDEO_OF_ONE,
        )
    return {name: {"found": got, "bar": bar, "met": got >= bar} for name, (got, bar) in figures.items()}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the figures, and writes the document after each part; returns 1 if a bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--tower", default="Qwen3-VL-8B")
    parser.add_argument("--images", type=int, default=5000)
    args = parser.parse_args(argv)
    need_gpus()
    count, device = torch.cuda.device_count(), torch.device("cuda:0")
    given = {"--tower": args.tower, "--images": args.images, "--json": args.json}
    about = passport("python -m fusedvit.bench.pixels.embed", given, args.commit)
    found: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        shown = {key: part for key, part in value.items() if key != "shards"} if isinstance(value, dict) else value
        print(name, shown, flush=True)
        write(args.json, {"passport": about, "figures": _judged(found), **found})

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "files").mkdir()
        for i, content in enumerate(jpegs(args.images, SIDE)):
            (folder / "files" / f"{i:05d}.jpg").write_bytes(content)
        model = checkpoint(folder / "model", args.tower)
        embed(model, folder / "files" / "00000.jpg", folder / "warm", [])  # compiles
        if count > 1:
            keep("two", embed(model, folder / "files", folder / "two", [0, 1]))
            keep("video", video(args.tower, [f"cuda:{i}" for i in range(count)]))
        keep("one", embed(model, folder / "files", folder / "one", [0] if count > 1 else []))
        keep("hugging_face", hugging_face(model, sorted((folder / "files").iterdir()), device))
    figures = _judged(found)
    for text, figure in figures.items():
        print(f"{figure['found']:8.2f}  at least {figure['bar']:5.2f}  {'ok' if figure['met'] else 'MISSED'}  {text}")
    return 0 if all(figure["met"] for figure in figures.values()) else 1


if __name__ == "__main__":
    run_program(main)
