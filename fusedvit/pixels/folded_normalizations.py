"""The normalisations that are folded into a tower's weights: pixels with one of them stay bytes until a kernel reads
them."""

import torch

from fusedvit.model.normalization import Normalization
from fusedvit.model.spec import VisionSpec
from fusedvit.pixels.byte_pixels import BytePixels


class FoldedNormalizations:
    """One normalisation for still images and one for all frames: the first of each that `expect` or a call brings.

    Attributes:
        known: the folded normalisations, by whether they are for still images; weights are prepared with them.
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
        """Has a normalisation folded into the weights, unless another is already or they cannot absorb it; returns
        whether it is the folded one.

        Raises:
            ValueError: its patches have another layout than the tower's.
        """
        spec, folded = self._spec, self.known
        if folded.get(still) == normalization:
            return True
        self.check(normalization)
        if not normalization.foldable:
            return False
        return folded.setdefault(still and spec.temporal_patch_size > 1, normalization) == normalization

    def check(self, normalization: Normalization) -> None:
        """Raises ValueError if patches of this normalisation have another layout than the tower's."""
        spec = self._spec
        if spec.padded:
            raise ValueError(f"fusedvit: {self._family} takes no bytes: rows of its patches have another layout")
        wanted = spec.in_channels, spec.temporal_patch_size, spec.patch_size
        got = normalization.channels, normalization.temporal_patch, normalization.patch
        if got != wanted:
            raise ValueError(f"fusedvit: pixel_values must be patches of (channels, frames, side) {wanted}, got {got}")

    def encoder_input(self, pixels: BytePixels) -> torch.Tensor:
        """The encoder's input: bytes where the normalisation of `pixels` is in the weights, else floats."""
        if self._spec.padded:
            return pixels.pixels()
        normalization, still = pixels.normalization, pixels.still
        known = self.known.get(still) is normalization or self.expect(normalization, still)
        return pixels.unmarked() if known else pixels.pixels()
