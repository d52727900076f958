"""Two ranks with sharded weights, vLLM's default under tensor parallelism: its own code, whose ranks wait in it."""

import sys
from pathlib import Path

import torch
from torch import multiprocessing

ROOT = Path(__file__).resolve().parents[3]


def rank_of(rank: int, port: int) -> None:
    sys.path.insert(0, str(ROOT))
    import fusedvit
    from fusedvit.errors import UnsupportedModel
    from tests.serving.vllm import support

    config = support.config_of("Qwen3VLForConditionalGeneration", tensor_parallel_size=2)
    with support.under(config):
        support.start(rank, 2, port)
    _, model = support.load(config=config, rank_and_world=(rank, 2))
    assert config.compilation_config.cudagraph_mm_encoder
    assert torch.isfinite(support.embed(config, model, support.GRIDS["mixed"])).all()
    try:
        fusedvit.fuse(model)
    except UnsupportedModel:
        print("own code on both ranks", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.serving.vllm.support import free_port

    multiprocessing.spawn(rank_of, (free_port(),), nprocs=2)
