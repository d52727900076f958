"""One call over two GPUs, from threads with streams of their own, while the weights change."""

import threading

import pytest
import torch

pytest.importorskip("transformers")

from fusedvit import DataParallelEncoder, FuseConfig, unfuse
from fusedvit.bench.graph_stress import DEVICE, FOUR_BLOCKS
from fusedvit.bench.towers import build, pixels_for
from tests.support.towers import copy_of, error_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
CONFIG = FuseConfig(token_budgets=(64, 256, 1024), max_items=16, max_frames=64, compile="now")
GRID = [(1, 20, 24), (3, 16, 16), (1, 8, 12), (1, 30, 30)]
LIMIT = 0.05  # of bf16; weights of before are 0.3 away


def test_calls_get_rows_of_the_weights_that_the_tower_has() -> None:
    tower, _ = build(FOUR_BLOCKS, torch.bfloat16, DEVICE)
    encoder = DataParallelEncoder(tower, ["cuda:0", "cuda:1"], CONFIG)
    pixels, found = pixels_for(tower, GRID), dict[int, torch.Tensor]()

    def call(i: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            found[i] = encoder(pixels, GRID)
            torch.cuda.current_stream().synchronize()

    for factor in (1.0, 1.5, 0.5):
        with torch.no_grad():
            for parameter in tower.merger.parameters():
                parameter.mul_(factor)
        torch.cuda.synchronize()
        with torch.inference_mode():
            alone = unfuse(copy_of(tower))(pixels, torch.tensor(GRID, device=DEVICE), return_dict=True).pooler_output
        threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        width = alone.shape[1]
        assert len(found) == 4 and all(rows.device == pixels.device for rows in found.values())
        assert all(error_of(rows[:, :width], alone) < LIMIT for rows in found.values())
        found.clear()
    copies = encoder._handle.stats()["copies"]
    assert copies and encoder._handle.stats()["original"] == {}
    encoder.close()
    unfuse(tower)
