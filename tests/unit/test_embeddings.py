"""Ready embeddings in the forms of vLLM, SGLang and transformers."""

import pytest
import torch

from fusedvit.serving.embeddings import VisionEmbeddings

GRID = torch.tensor([[1, 4, 6], [2, 2, 4]])  # 6 and 4 merged tokens
ROWS = torch.arange(10 * 3 * 8.0).view(10, 24)  # two deepstack levels


def test_what_engines_take() -> None:
    whole = VisionEmbeddings(ROWS, GRID, 2, levels=2)
    assert [item.rows.tolist() for item in whole.items()] == [ROWS[:6].tolist(), ROWS[6:].tolist()]
    assert whole.for_vllm()["image"].keys() == {"image_embeds", "image_grid_thw"}
    (entry,) = whole.for_sglang("video")
    assert entry["format"] == "processor_output" and entry["modality"] == "VIDEO"
    assert entry["precomputed_embeddings"] is not None and entry["video_grid_thw"].tolist() == GRID.tolist()


@pytest.mark.parametrize("levels", [0, 2])
def test_transformers_record(levels: int) -> None:
    pytest.importorskip("transformers")
    rows = ROWS[:, : 8 * (1 + levels)]
    found = VisionEmbeddings(rows, GRID, 2, levels).for_transformers()["image"]
    assert torch.equal(torch.cat(list(found.pooler_output)), rows[:, :8])
    for level in range(levels):
        assert torch.equal(torch.cat(list(found.deepstack_features[level])), rows[:, 8 * (level + 1) : 8 * (level + 2)])


@pytest.mark.parametrize(
    "rows, grid, expected",
    [
        (ROWS[:9], GRID, r"rows must be \[10, a multiple of 3\]"),
        (ROWS[:, :23], GRID, "multiple of 3"),
        (ROWS, GRID[0], r"grid_thw must be \[N, 3\]"),
    ],
)
def test_what_does_not_fit(rows: torch.Tensor, grid: torch.Tensor, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        VisionEmbeddings(rows, grid, 2, levels=2)
    with pytest.raises(ValueError, match="'image' or 'video'"):
        VisionEmbeddings(ROWS, GRID, 2, levels=2).for_vllm("audio")


@pytest.mark.parametrize("modality, timestamps", [("image", [[0.0], [0.0, 1.0]]), ("video", [[0.0], [0.0]])])
def test_timestamps_that_do_not_fit(modality: str, timestamps: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"timestamps must be \[1, 2\] of the items of a video"):
        VisionEmbeddings(ROWS, GRID, 2, levels=2).for_vllm(modality, timestamps)
