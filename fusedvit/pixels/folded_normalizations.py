"""The normalisations of bytes that a tower's weights have folded in: pixels of these stay bytes until a kernel reads
them."""

import torch

from fusedvit.model.normalization import Normalization
from fusedvit.model.spec import VisionSpec
from fusedvit.pixels.byte_pixels import BytePixels


class FoldedNormalizations:
    """One for still images and one for all frames, the first of each that is expected or brought.

    Attributes:
        known: by whether they are of still images; weights are prepared with these.
    """

    def __init__(self, spec: VisionSpec, family: str) -> None:
        """
        Args:
            family: its name, for errors.
        """
        self.known: dict[bool, Normalization] = {}
        self._spec = spec
        self._family = family

    def expect(self, normalization: Normalization, still: bool) -> bool:
        """Folds a normalisation into weights, now or when they are prepared; whether it is the one that is folded.

        Raises:
            ValueError: patches of another layout than the tower's.
        """
        spec, folded = self._spec, self.known
        if folded.get(still) == normalization:
            return True
        if spec.padded:
            raise ValueError(f"fusedvit: {self._family} takes no bytes: rows of its patches have another layout")
        wanted = spec.in_channels, spec.temporal_patch_size, spec.patch_size
        got = normalization.channels, normalization.temporal_patch, normalization.patch
        if got != wanted:
            raise ValueError(f"fusedvit: pixel_values must be patches of (channels, frames, side) {wanted}, got {got}")
        return folded.setdefault(still and spec.temporal_patch_size > 1, normalization) == normalization

    def taken(self, pixels: BytePixels) -> torch.Tensor:
        """What the encoder takes of them: bytes where their normalisation is in the weights, else floats."""
        if self._spec.padded:
            return pixels.pixels()
        normalization, still = pixels.normalization, pixels.still
        known = self.known.get(still) is normalization or self.expect(normalization, still)
        return pixels.unmarked() if known else pixels.pixels()
