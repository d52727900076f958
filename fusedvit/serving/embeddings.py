"""Vision embeddings that were computed elsewhere, in the forms in which engines and transformers take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedvit.errors import shown
from fusedvit.runtime.inputs import items_of_grid


@dataclass(frozen=True)
class VisionEmbeddings:
    """A tower's outputs for images or videos, for language models that do not run the tower themselves.

    Attributes:
        rows: `[tokens, (1 + n) * out]`, as `FusedEncoder.concatenated` returns them: for each merged token the merger's
            output, then the output of each of n deepstack mergers.
        grid_thw: `[N, 3]`: frames, and rows and columns of patches, of each item.
        merge_size: patches per side of a merged token.
        levels: n, the number of deepstack mergers.

    Raises:
        TypeError: `rows` or `grid_thw` is no tensor, or one of the numbers is no integer.
        ValueError: no image has such a grid, or the shape of `rows` does not fit it.
    """

    rows: torch.Tensor
    grid_thw: torch.Tensor
    merge_size: int
    levels: int = 0

    def __post_init__(self) -> None:
        _check_whole("merge_size", self.merge_size, 1)
        _check_whole("levels", self.levels, 0)
        for name in ("rows", "grid_thw"):
            if not isinstance(getattr(self, name), torch.Tensor):
                raise TypeError(f"fusedvit: {name} must be a tensor, got {type(getattr(self, name)).__name__}")
        if not self.rows.is_floating_point():
            raise TypeError(f"fusedvit: rows must be floats, got {self.rows.dtype}")
        items_of_grid(self.grid_thw, self.merge_size)
        tokens = sum(self.tokens())
        if self.rows.ndim != 2 or self.rows.shape[0] != tokens or self.rows.shape[1] % (1 + self.levels):
            raise ValueError(
                f"fusedvit: rows must be [{tokens}, a multiple of {1 + self.levels}] for this grid_thw, "
                f"got shape {tuple(self.rows.shape)}"
            )

    def tokens(self) -> list[int]:
        """Merged tokens of each item."""
        return [int(n) for n in self.grid_thw.prod(1) // self.merge_size**2]

    def items(self) -> list["VisionEmbeddings"]:
        """One record per item, whose rows are views."""
        parts = self.rows.split(self.tokens())
        return [
            VisionEmbeddings(part, self.grid_thw[i : i + 1], self.merge_size, self.levels)
            for i, part in enumerate(parts)
        ]

    def for_vllm(self, modality: str = "image", timestamps: Sequence[Sequence[float]] | None = None) -> dict[str, Any]:
        """vLLM's `multi_modal_data` (`--enable-mm-embeds`): `{"image": {"image_embeds": …, "image_grid_thw": …}}`.

        Args:
            modality: "image" or "video".
            timestamps: for videos of Qwen3-VL and Qwen3.5: for each item, the seconds of each of its `grid_thw` frames.
                vLLM 0.33 writes them into the prompt.

        Raises:
            TypeError: timestamps are no lists of numbers.
            ValueError: another modality; timestamps for images, or not one per frame.
        """
        _check_modality(modality)
        found = {f"{modality}_embeds": self.rows.cpu(), f"{modality}_grid_thw": self.grid_thw.cpu()}
        if timestamps is None:
            return {modality: found}
        if modality != "video":
            raise ValueError(f"fusedvit: timestamps are for modality 'video', got them for {shown(modality)}")
        try:
            times = [list(item) for item in timestamps]
        except TypeError:
            raise TypeError(f"fusedvit: timestamps must be a list for each item, got {shown(timestamps)}") from None
        odd = next((t for item in times for t in item if not isinstance(t, int | float)), None)
        if odd is not None:
            raise TypeError(f"fusedvit: timestamps must be seconds, got {shown(odd)}")
        frames, got = self.grid_thw[:, 0].tolist(), list(map(len, times))
        if got != frames:
            raise ValueError(f"fusedvit: timestamps must be {frames} for these items, one a frame, got {got}")
        return {modality: found | {"timestamps": times}}

    def for_sglang(self, modality: str = "image") -> list[dict[str, Any]]:
        """SGLang's `image_data=` or `video_data=`: one entry, which holds every item of a request.

        `input_ids=` must hold a placeholder for each row. SGLang 0.5.21 to 0.5.23 replace the placeholders by the
        `precomputed_embeddings` of an entry whose format is `processor_output`. Entries of the format
        `precomputed_embedding` would run through the tower, except for images of Qwen2.5-VL.

        Args:
            modality: "image" or "video".
        """
        _check_modality(modality)
        entry = {"format": "processor_output", "modality": modality.upper()}
        return [entry | {"precomputed_embeddings": self.rows.cpu(), f"{modality}_grid_thw": self.grid_thw.cpu()}]

    def for_transformers(self, modality: str = "image") -> dict[str, Any]:
        """transformers' `mm_encoder_outputs=` (5.23 and later), as `model.get_image_features` would return it.

        Args:
            modality: "image" or "video".
        """
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        _check_modality(modality)
        merged, *deepstack = [list(level.split(self.tokens())) for level in self.rows.chunk(1 + self.levels, dim=1)]
        if not deepstack:
            return {modality: BaseModelOutputWithPooling(pooler_output=merged)}
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        return {modality: BaseModelOutputWithDeepstackFeatures(pooler_output=merged, deepstack_features=deepstack)}


def _check_whole(name: str, given: object, least: int) -> None:
    if type(given) is not int:
        raise TypeError(f"fusedvit: {name} must be an integer, got {shown(given)}")
    if given < least:
        raise ValueError(f"fusedvit: {name} must be {least} or more, got {given}")


def _check_modality(modality: str) -> None:
    if modality not in ("image", "video"):
        raise ValueError(f"fusedvit: modality must be 'image' or 'video', got {shown(modality)}")
