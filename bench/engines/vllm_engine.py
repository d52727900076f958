"""A whole vLLM engine on GPUs, with and without the plugin: answers, time in the vision tower, memory, sleep, reload.

    python -m fusedvit.bench.engines.vllm_engine FOLDER --json PATH [--tower NAME] [--ranks N] [--mode data|weights]
        [--runner V1|V2]

FOLDER is a site-packages that holds vLLM. The model has the tower of `--tower`, a small language model and random
weights, and is loaded from a checkpoint like any other. Each engine is a process of its own, in which vLLM finds the
plugin by its entry point. Answers are log probabilities of the first token, compared with Hugging Face's in fp32.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import fusedvit
from fusedvit.bench.records import ROOT, arguments, need_gpus, passport, run_program, write
from fusedvit.bench.towers import GEOMETRIES, random_weights_
from fusedvit.errors import InputError
from fusedvit.graphs.manager import MIB

RUNNERS = "V1", "V2"  # dense models get V2 by default; it has no encoder graphs
_CHECKPOINTS = "first", "second"
_OTHER = "other weights"  # the stage in which an engine has the second checkpoint's weights
_TEXT = {"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_TEXT |= {"intermediate_size": 4096, "max_position_embeddings": 32768}
_WORDS = tuple(f"<|{name}|>" for name in ("endoftext", "vision_start", "vision_end", "image_pad", "video_pad"))
_IMAGE, _VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
_SIDES = {"one image": [(448, 448)], "three images": [(224, 224), (640, 480), (1024, 768)]}
_TIMED = 64  # requests of an image of 448 x 448 pixels
_ROUNDS = 6  # the first is not counted
_SECONDS = "_encoder_seconds"  # attribute of a worker: seconds of its encoder steps
_NOISE = 2.0  # allowed multiple of vLLM's own distance from Hugging Face in fp32; _FLOOR is added
_FLOOR = 0.01


def main(argv: list[str] | None = None) -> int:
    """Runs the engines; returns 1 if a fused engine's answer is further from Hugging Face's than the rule allows, or if
    its tower did not run fused."""
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tower", default="Qwen3-VL-8B", choices=[*GEOMETRIES])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mode", default="data", choices=["data", "weights"], help="mm_encoder_tp_mode")
    parser.add_argument("--runner", action="append", choices=RUNNERS, help="vLLM's model runner; both if left out")
    parser.add_argument("--child", type=Path, help="an engine alone, of the checkpoints here")
    args = parser.parse_args(argv)
    if args.child:
        return _engine(args.child, args.ranks, args.mode, args.json)
    need_gpus(args.ranks)
    if GEOMETRIES[args.tower].model != "qwen3_vl":
        raise InputError(f"--tower: {args.tower} is of another family, expected one of Qwen3-VL")
    with tempfile.TemporaryDirectory() as own:
        scratch = Path(own)
        want = {name: _right(scratch / name, args.tower, seed) for seed, name in enumerate(_CHECKPOINTS, 1)}
        document = _document(args)
        runners = args.runner or RUNNERS
        for runner in runners:
            pair = {name: _run_engine(args, scratch, runner, name == "vllm") for name in ("vllm", "fusedvit")}
            document[runner] = verdict(pair, want)
            write(args.json, document)
            print(runner, json.dumps({n: document[runner][n] for n in ("answers", "holds")}))
    return 0 if all(document[runner]["holds"] for runner in runners) else 1


def _document(args: Any) -> dict[str, Any]:
    given = {"--tower": args.tower, "--ranks": args.ranks, "--mode": args.mode, "--runner": args.runner}
    given |= {"--json": args.json}
    of = passport("python -m fusedvit.bench.engines.vllm_engine FOLDER", given, args.commit)
    return {"passport": of, "tower": args.tower, "ranks": args.ranks, "mode": args.mode}


# the model


def _right(folder: Path, tower: str, seed: int) -> dict[str, list[float]]:
    """Writes a checkpoint into `folder`, and returns Hugging Face's answers for it."""
    _checkpoint(folder, tower, seed)
    return _hugging_face(folder)


def _checkpoint(folder: Path, tower: str, seed: int) -> None:
    """Writes a whole Qwen3-VL with its processor by `save_pretrained`; `seed` changes the tower's weights only."""
    import transformers

    tokenizer = _tokenizer()
    numbers = GEOMETRIES[tower].numbers
    ids = dict(zip(_WORDS, tokenizer.convert_tokens_to_ids(list(_WORDS)), strict=True))
    text = _TEXT | {"hidden_size": numbers["out_hidden_size"], "vocab_size": len(tokenizer)}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}}
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=numbers,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    with torch.device("cuda"):
        model = transformers.Qwen3VLForConditionalGeneration(config)
    random_weights_(model, device="cuda")
    random_weights_(model.model.visual, seed, "cuda")
    model.to(torch.bfloat16).save_pretrained(folder)
    image = transformers.Qwen2VLImageProcessor(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    video = transformers.Qwen3VLVideoProcessor()
    transformers.Qwen3VLProcessor(image, tokenizer, video, chat_template=" ").save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def _tokenizer() -> Any:
    """A tokenizer of bytes and the special tokens of a chat: no vocabulary can be downloaded."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {letter: at for at, letter in enumerate(sorted(ByteLevel.alphabet()))}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=list(_WORDS))


def _requests() -> dict[str, dict[str, Any]]:
    """Prompts by name."""
    from PIL import Image

    rng = np.random.default_rng(0)
    found: dict[str, dict[str, Any]] = {}
    for name, sides in _SIDES.items():
        images = [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sides]
        found[name] = {"prompt": _IMAGE * len(images) + "What is it?", "multi_modal_data": {"image": images}}
    frames = rng.integers(0, 256, (8, 224, 224, 3), dtype=np.uint8)
    about = {"fps": 2.0, "duration": 4.0, "total_num_frames": 8, "frames_indices": [*range(8)]}
    about |= {"video_backend": "opencv", "do_sample_frames": False}
    video = {"video": [(frames, about)]}
    found["a video"] = {"prompt": f"{_VIDEO}What happens?", "multi_modal_data": video}
    mixed = video | found["one image"]["multi_modal_data"]
    found["both"] = {"prompt": f"{_IMAGE}{_VIDEO}Which?", "multi_modal_data": mixed}
    return found


def _hugging_face(folder: Path) -> dict[str, list[float]]:
    """Log probabilities of the first token in fp32, for the requests without video: vLLM writes frames' times into a
    prompt in its own way."""
    import transformers

    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).to("cuda").eval()
    found = {}
    for name in _SIDES:
        request = _requests()[name]
        inputs = processor(text=[request["prompt"]], images=request["multi_modal_data"]["image"], return_tensors="pt")
        with torch.inference_mode():
            logits = model(**inputs.to("cuda")).logits[0, -1]
        found[name] = logits.log_softmax(-1).tolist()
    del model
    torch.cuda.empty_cache()
    return found


# an engine


def _run_engine(args: Any, scratch: Path, runner: str, disabled: bool) -> dict[str, Any]:
    """Runs an engine in a process of its own and returns its document."""
    with tempfile.TemporaryDirectory() as own:
        out, site = Path(own) / "engine.json", Path(own) / "site"
        _write_metadata(site)
        folders = [str(site), str(args.folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "FUSEDVIT_DISABLE": str(int(disabled))}
        environment |= {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == RUNNERS[1])), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        environment |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        command = [sys.executable, "-m", "fusedvit.bench.engines.vllm_engine", str(args.folder)]
        command += ["--child", str(scratch), "--ranks", str(args.ranks), "--mode", args.mode, "--json", str(out)]
        code = subprocess.run(command, env=environment, check=False).returncode
        return json.loads(out.read_text()) if code == 0 else {"failed": code}


def _write_metadata(site: Path) -> None:
    """Writes the metadata that `pip install` would write for this checkout: its entry points."""
    if any(point.name == "fusedvit" for point in entry_points(group="vllm.general_plugins")):
        return
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    home = site / f"fusedvit-{fusedvit.__version__}.dist-info"
    home.mkdir(parents=True, exist_ok=True)
    (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fusedvit\nVersion: {fusedvit.__version__}\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (home / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _engine(scratch: Path, ranks: int, mode: str, out: Path) -> int:
    """Runs an engine through all its stages, from its start to the reload with other weights."""
    document: dict[str, Any] = {"free MiB": {"before": _free()}, "wake s": {}, "log probabilities": {}}
    free, answers = document["free MiB"], document["log probabilities"]
    begun = time.perf_counter()
    llm = _start(scratch / _CHECKPOINTS[0], ranks, mode)
    document["load s"] = time.perf_counter() - begun
    document["KV blocks"] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    free["loaded"] = _free()
    llm.collective_rpc(_time_steps)
    answers["fresh"] = _answers(llm)
    document["timed"] = _timed(llm)
    for level in (1, 2):
        llm.sleep(level=level)
        free[f"asleep on level {level}"] = _free()
        document["wake s"][f"from level {level}"] = _wake(llm, level)
        free[f"woken from level {level}"] = _free()
        answers[f"woken from level {level}"] = _answers(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(scratch / _CHECKPOINTS[1])})
    answers[_OTHER] = _answers(llm)
    document["stats"] = [] if os.environ["FUSEDVIT_DISABLE"] == "1" else llm.collective_rpc("fusedvit_stats")
    write(out, document)
    return 0


def _start(folder: Path, ranks: int, mode: str) -> Any:
    """An engine as `vllm serve` starts it, with sleep mode, and without caches that would skip the encoder."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=16384,
        gpu_memory_utilization=0.5,
        enable_sleep_mode=True,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        limit_mm_per_prompt={"image": 8, "video": 1},
        compilation_config={"cudagraph_mm_encoder": True},
        tensor_parallel_size=ranks,
        mm_encoder_tp_mode=mode,
        max_logprobs=-1,
        seed=0,
    )


def _wake(llm: Any, level: int) -> float:
    """Wakes an engine, reloads its weights if sleep has lost them, and returns the seconds that this took."""
    begun = time.perf_counter()
    llm.wake_up()
    if level > 1:
        llm.collective_rpc("reload_weights")
    return time.perf_counter() - begun


def _answers(llm: Any) -> dict[str, list[float]]:
    """Log probabilities of the first token over the vocabulary, by request."""
    from vllm import SamplingParams

    requests = _requests()
    given = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1)
    found = {}
    for name, output in zip(requests, llm.generate([*requests.values()], given, use_tqdm=False), strict=True):
        table = output.outputs[0].logprobs[0]
        found[name] = [table[token].logprob for token in sorted(table)]
    return found


def _timed(llm: Any) -> dict[str, float]:
    """Times many requests at once: medians of the total seconds, and of those in the slowest rank's encoder steps."""
    from PIL import Image
    from vllm import SamplingParams

    rng = np.random.default_rng(1)
    images = [Image.fromarray(rng.integers(0, 256, (448, 448, 3), dtype=np.uint8)) for _ in range(_TIMED)]
    requests = [{"prompt": f"{_IMAGE}What?", "multi_modal_data": {"image": [image]}} for image in images]
    whole, encoder = [], []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        llm.generate(requests, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
        whole.append(time.perf_counter() - begun)
        steps = llm.collective_rpc(_seconds)
        encoder.append(max(map(sum, steps)))
    found = {"requests": _TIMED, "s": median(whole[1:]), "in the encoder, s": median(encoder[1:])}
    return found | {"encoder steps": len(steps[0])}


def _time_steps(worker: Any) -> None:
    """Runs in a worker: times its encoder steps from now on."""
    runner = worker.model_runner
    seconds: list[float] = []
    holder, name = runner, "_execute_mm_encoder"
    if not hasattr(runner, name):
        holder, name = runner.model_state.encoder_runner, name.removeprefix("_")
    original = getattr(holder, name)
    setattr(worker, _SECONDS, seconds)

    def step(what: Any) -> Any:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        found = original(what)
        torch.cuda.synchronize()
        if found:
            seconds.append(time.perf_counter() - begun)
        return found

    setattr(holder, name, step)


def _seconds(worker: Any) -> list[float]:
    """Runs in a worker: the seconds of each encoder step since the last call of this function."""
    found: list[float] = getattr(worker, _SECONDS)
    answer = found[:]
    found.clear()
    return answer


def _free() -> int:
    return int(torch.cuda.mem_get_info()[0]) // MIB


# comparison of both engines


def verdict(pair: dict[str, Any], want: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The documents of two engines, vLLM's own and the fused one's, with answers reduced to distances.

    Args:
        want: Hugging Face's answers, by checkpoint and request.
    """
    found: dict[str, Any] = {name: {k: v for k, v in pair[name].items() if k != "log probabilities"} for name in pair}
    found["answers"] = _compared(pair, want)
    return found | {"holds": _holds(found)}


def _compared(pair: dict[str, Any], want: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Largest differences of log probabilities, by stage and request: of vLLM's and the fused engine's from each other,
    and of both from Hugging Face's."""
    found: dict[str, Any] = {}
    all_theirs, all_ours = (pair[name].get("log probabilities", {}) for name in ("vllm", "fusedvit"))
    for stage in all_ours if all_theirs else []:
        found[stage] = {}
        for request, ours in all_ours[stage].items():
            theirs, right = all_theirs[stage][request], want[_CHECKPOINTS[stage == _OTHER]].get(request)
            row = found[stage][request] = {"ours - theirs": _distance(ours, theirs)}
            if right is not None:
                row |= {"theirs - right": _distance(theirs, right), "ours - right": _distance(ours, right)}
    return found


def _distance(one: list[float], other: list[float]) -> float:
    return float(np.abs(np.subtract(one, other)).max())


def _holds(document: dict[str, Any]) -> bool:
    rows = [row for stage in document["answers"].values() for row in stage.values() if "ours - right" in row]
    near = [row["ours - right"] <= _NOISE * row["theirs - right"] + _FLOOR for row in rows]
    stats = [tower for rank in document["fusedvit"].get("stats", []) for tower in rank.values()]
    return bool(near) and all(near) and bool(stats) and all(s["fused"] == s["calls"] > 0 for s in stats)


if __name__ == "__main__":
    run_program(main)
