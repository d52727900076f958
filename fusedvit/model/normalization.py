"""How an image processor turns bytes into a tower's pixels: exactly, and as an affine map to fold into weights."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

BACKENDS = ("torchvision", "pil")
_NORMAL = 2.0**-126, 2.0**127  # numbers within are normal in fp32, in which processors compute
_FACTORS = (1e-4, 1e4)  # range of the factor on bytes; processors use 1/255 to 1/50


@dataclass(frozen=True)
class Normalization:
    """Rescaling and normalisation of Hugging Face's image and video processors, and the layout of a patch's row.

    A row is a flat `[channels, temporal_patch, patch, patch]`. For a still image, whose frames are equal, it is a flat
    `[channels, patch, patch]`.

    Attributes:
        rescale_factor: the factor that bytes are multiplied by; None if the processor does not rescale.
        mean, std: per channel (a single number applies to all channels); None if the processor does not normalise.
        patch: pixels on a side of a patch.
        temporal_patch: frames of a patch.
        channels: channels of an image.
        backend: the processor's backend, one of `BACKENDS`; their order of operations differs, and so do the last bits.

    Raises:
        TypeError: an attribute of another type.
        ValueError: a number that no processor can have (a factor or deviation of 0, one that is not finite, or one that
            leaves the range of fp32), or an unknown backend.
    """

    rescale_factor: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    patch: int
    temporal_patch: int = 2
    channels: int = 3
    backend: str = "torchvision"

    def __post_init__(self) -> None:
        check_counts(patch=self.patch, temporal_patch=self.temporal_patch, channels=self.channels)
        if self.backend not in BACKENDS:
            raise ValueError(f"fusedvit: backend must be one of {BACKENDS}, got {self.backend!r}")
        if (self.mean is None) != (self.std is None):
            given = f"{self.mean} and {self.std}"
            raise ValueError(f"fusedvit: mean and std must both be given or both be None, got {given}")
        if self.rescale_factor is not None:
            _number("rescale_factor", self.rescale_factor)
        for name in ("mean", "std"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, self._of_channels(name, given))
        self._check_values()

    def _check_values(self) -> None:
        """The pixels of bytes, and what the processors compute on the way to them, must be normal in fp32."""
        scale = float(self._scale)
        if scale == 0.0:
            raise ValueError(f"fusedvit: rescale_factor must not be 0, got {self.rescale_factor}")
        least, most = _NORMAL
        for mean, std in self._of_each_channel():
            if std == 0.0:
                raise ValueError(f"fusedvit: std must not be 0, got {self.std}")
            largest = 255 * abs(scale) + abs(mean)
            if not all(least <= abs(n) <= most for n in (std, std / scale, largest, largest / scale, largest / std)):
                got = f"rescale_factor {self.rescale_factor}, mean {mean}, std {std}"
                raise ValueError(f"fusedvit: pixels must be within the range of torch.float32, got {got}")

    @property
    def _scale(self) -> float:
        return 1.0 if self.rescale_factor is None else self.rescale_factor

    def _of_each_channel(self) -> tuple[tuple[float, float], ...]:
        """(mean, std) of each channel; only (0, 1) if the processor does not normalise."""
        return ((0.0, 1.0),) if self.mean is None or self.std is None else tuple(zip(self.mean, self.std, strict=True))

    @property
    def foldable(self) -> bool:
        """Whether weights can absorb it: very small or large factors would leave the range of half precision."""
        low, high = _FACTORS
        scale = self._scale
        return all(low <= abs(scale / std) <= high >= abs(mean / std) for mean, std in self._of_each_channel())

    def _of_channels(self, name: str, given: float | Sequence[float]) -> tuple[float, ...]:
        if isinstance(given, Iterable) and not isinstance(given, str | bytes):
            values = tuple(given)
        else:
            values = (_number(name, given),) * self.channels
        if len(values) != self.channels:
            raise ValueError(f"fusedvit: {name} must have {self.channels} values, one a channel, got {len(values)}")
        return tuple(_number(name, value) for value in values)

    def width(self, still: bool) -> int:
        """Bytes of a patch's row: of one frame if `still`, else of all frames."""
        return self.channels * self.patch**2 * (1 if still else self.temporal_patch)

    def affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(factor, shift)`, each `[channels]` fp64: the processor computes `factor * byte + shift`."""
        scale = self._scale
        if self.mean is None or self.std is None:
            ones = torch.ones(self.channels, dtype=torch.float64, device="cpu")
            return ones * scale, ones * 0
        mean, std = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in (self.mean, self.std))
        return scale / std, -mean / std

    def apply(self, rows: torch.Tensor, still: bool) -> torch.Tensor:
        """The processor's output for the bytes in `rows`, bit for bit.

        The formulas are transformers': `TorchvisionBackend.rescale_and_normalize`, or `rescale` and then `normalize` of
        `image_transforms`.

        Args:
            rows: `[…, width(still)]` uint8.
            still: rows hold one frame, which is repeated.

        Returns:
            `[…, width(False)]` fp32.
        """
        frames = 1 if still else self.temporal_patch
        shape = (*rows.shape[:-1], self.channels, frames, self.patch**2)
        values = self._values(rows.reshape(shape))
        values = values.expand(*shape[:-2], self.temporal_patch, self.patch**2)
        return values.reshape(*rows.shape[:-1], self.width(False))

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised values of bytes `[…, channels, frames, n]`, in fp32."""
        scale = self.rescale_factor
        exact = self.backend == "pil"
        if self.mean is None:
            factor = 1.0 if scale is None else scale
            return (x.double() * factor).float() if exact else x.float() * factor
        both = torch.tensor((self.mean, self.std), dtype=torch.float32, device=x.device)
        mean, std = both[..., None, None]
        if scale is None:
            x = x.float()
        elif exact:
            x = (x.double() * scale).float()
        else:
            x, mean, std = x.float(), mean * (1.0 / scale), std * (1.0 / scale)
        return (x - mean) / std


def check_counts(**given: Any) -> None:
    """Raises TypeError or ValueError where an argument, by its name, is no int of at least 1."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"fusedvit: {name} must be an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"fusedvit: {name} must be at least 1, got {value}")


def _number(name: str, given: Any) -> float:
    """`given` as a finite float. Raises TypeError or ValueError if it is none."""
    try:
        if isinstance(given, str | bytes):  # which `float` would read
            raise TypeError
        value = float(given)
    except OverflowError:  # an int that no float holds
        value = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"fusedvit: {name} must be a number, got {type(given).__name__}") from None
    if not math.isfinite(value):
        raise ValueError(f"fusedvit: {name} must be finite, got {value}")
    return value
