"""Ready embeddings in the forms of vLLM, SGLang and transformers."""

from typing import Any

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
        (ROWS, GRID[0], r"grid_thw must have shape \(n, 3\), got \(3,\)"),
        (ROWS, torch.tensor([[1, 4, 5], [2, 2, 5]]), "w to be a multiple of the merge size 2, got 5"),
        (ROWS, torch.tensor([[-1, -4, 6], [2, 2, 4]]), "t >= 0, got -1"),
        (ROWS, GRID.float(), "an integer dtype, got torch.float32"),
    ],
)
def test_what_does_not_fit(rows: torch.Tensor, grid: torch.Tensor, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        VisionEmbeddings(rows, grid, 2, levels=2)
    with pytest.raises(ValueError, match="'image' or 'video'"):
        VisionEmbeddings(ROWS, GRID, 2, levels=2).for_vllm("audio")


@pytest.mark.parametrize(
    "modality, timestamps, error, said",
    [
        ("image", [[0.0], [0.0, 1.0]], ValueError, "timestamps are for modality 'video', got them for 'image'"),
        (
            "video",
            [[0.0], [0.0]],
            ValueError,
            r"timestamps must be \[1, 2\] for these items, one a frame, got",
        ),
        ("video", 5, TypeError, "timestamps must be a list for each item, got 5"),
        ("video", [0.0, 1.0], TypeError, r"timestamps must be a list for each item, got \[0.0, 1.0\]"),
    ],
)
def test_timestamps_that_do_not_fit(modality: str, timestamps: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^fusedvit: {said}"):
        VisionEmbeddings(ROWS, GRID, 2, levels=2).for_vllm(modality, timestamps)


@pytest.mark.parametrize(
    "change, error, expected",
    [
        ({"grid_thw": [[1, 4, 6], [2, 2, 4]]}, TypeError, "grid_thw must be a tensor, got list"),
        ({"rows": ROWS.numpy()}, TypeError, "rows must be a tensor, got ndarray"),
        ({"rows": ROWS.long()}, TypeError, "rows must be floats, got torch.int64"),
        ({"merge_size": 0}, ValueError, "merge_size must be 1 or more, got 0"),
        ({"merge_size": 2.0}, TypeError, r"merge_size must be an integer, got 2\.0"),
        ({"levels": -1}, ValueError, "levels must be 0 or more, got -1"),
        ({"levels": True}, TypeError, "levels must be an integer, got True"),
    ],
)
def test_what_is_of_another_type(change: dict[str, Any], error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=f"fusedvit: {expected}"):
        VisionEmbeddings(**{"rows": ROWS, "grid_thw": GRID, "merge_size": 2, "levels": 2} | change)


def test_timestamps_that_are_no_numbers() -> None:
    with pytest.raises(TypeError, match="timestamps must be seconds, got 'b'"):
        VisionEmbeddings(ROWS, GRID, 2, levels=2).for_vllm("video", ["a", "bc"][1:] * 2)  # type: ignore[list-item]
