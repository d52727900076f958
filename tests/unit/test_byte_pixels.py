"""Bytes under a mark: what keeps it, what refuses, and the values that Hugging Face's processors make of them."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from fusedvit.model.normalization import Normalization
from fusedvit.pixels.byte_pixels import BytePixels

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CLIP = Normalization(1 / 255, MEAN, STD, patch=2)
ROWS = 6


def marked(still: bool = False, normalization: Normalization = CLIP) -> BytePixels:
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, normalization.width(still))
    return BytePixels.mark(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator), normalization, still)


def loaded(x: BytePixels) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


INDEX = torch.tensor([4, 0, 0])
KEEPING: dict[str, Callable[[Any], Any]] = {
    "slice": lambda x: x[1:4],
    "step": lambda x: x[::2],
    "row": lambda x: x[3],
    "rows": lambda x: x[INDEX],
    "list": lambda x: x[[1, 2]],
    "mask": lambda x: x[torch.arange(ROWS) > 2],
    "padded batch": lambda x: x.view(2, 3, -1)[torch.tensor([[True, False, True], [False, False, True]])],
    "ellipsis": lambda x: x[2:, ...],
    "whole rows": lambda x: x[2:, :],
    "whole rows, said in numbers": lambda x: x[2:, 0 : x.shape[1]],
    "no rows": lambda x: x[:0],
    "new dimension": lambda x: x[None],
    "two": lambda x: x.view(2, 3, -1)[0, 1:],
    "cat": lambda x: torch.cat([x[:2], x], dim=0),
    "stack": lambda x: torch.stack([x, x]),
    "split": lambda x: x.split(2)[1],
    "split at": lambda x: torch.split(x, [2, 4])[1],
    "chunk": lambda x: x.chunk(2)[0],
    "unbind": lambda x: x.unbind(0)[1],
    "iterate": lambda x: list(x)[2],
    "index_select": lambda x: x.index_select(0, INDEX),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=0),
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1),
    "batch of one": lambda x: x.unsqueeze(0).squeeze(0),
    "pad": lambda x: torch.nn.utils.rnn.pad_sequence([x[:4], x[4:]], batch_first=True)[0],
    "pad rows": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 2))[:ROWS],
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach().contiguous().data,
    "cpu": lambda x: x.cpu(),
    "to device": lambda x: x.to("cpu", non_blocking=True),
    "share": lambda x: x.clone().share_memory_(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": loaded,
}
CASTS: dict[str, Callable[[Any], Any]] = {
    "to": lambda x: x.to(torch.bfloat16),
    "to device and dtype": lambda x: x.to("cpu", torch.float16),
    "to keywords": lambda x: x.to(device="cpu", dtype=torch.float16, non_blocking=True),
    "to flags": lambda x: x.to("cpu", torch.bfloat16, False, True),
    "to another": lambda x: x.to(torch.zeros(1, dtype=torch.float64)),
    "type": lambda x: x.type(torch.bfloat16),
    "there and back": lambda x: x.half().float(),
    "bfloat16": lambda x: x.bfloat16(),
    "double": lambda x: x.double(),
    "same": lambda x: x.float(),
    "move": lambda x: x.to("cpu"),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "reflected": lambda x: 255 - x,
    "times a tensor": lambda x: torch.ones(ROWS, x.shape[1]) * x,
    "in place": lambda x: x.mul_(2),
    "augmented": lambda x: x.__iadd__(1),
    "equal": lambda x: x == x,
    "compare": lambda x: x > 3,
    "negative": lambda x: -x,
    "bool": bool,
    "sum": lambda x: x.sum(),
    "write": lambda x: x.__setitem__(0, 0),
    "copy into a plain one": lambda x: torch.zeros(x.shape).copy_(x),
    "column": lambda x: x[:, 0],
    "part of rows": lambda x: x[..., 3:],
    "columns": lambda x: x[:, torch.arange(x.shape[1])],
    "list of lists": lambda x: x[[[0, 1], [2, 3]]],  # a tuple to torch
    "bits": lambda x: x[torch.ones(ROWS, x.shape[1], dtype=torch.bool)],
    "transpose": lambda x: x.T,
    "permute": lambda x: x.permute(1, 0),
    "other width": lambda x: x.view(-1, 3, x.shape[1] // 3),
    "other dtype": lambda x: x.view(torch.int8),
    "same dtype": lambda x: x.view(torch.uint8),  # of floats four times as wide
    "flat": lambda x: x.flatten(),
    "split rows": lambda x: x.split(2, dim=1),
    "unbind rows": lambda x: x.unbind(-1),
    "stack within": lambda x: torch.stack([x, x], dim=2),
    "cat rows": lambda x: torch.cat([x, x], dim=1),
    "cat along an axis": lambda x: torch.cat([x, x], axis=1),
    "pad columns": lambda x: torch.nn.functional.pad(x, (0, 2)),
    "pad with ones": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 2), value=1.0),
    "pad a sequence with ones": lambda x: torch.nn.utils.rnn.pad_sequence([x[:2], x], padding_value=1.0),
    "cat with floats": lambda x: torch.cat([x, torch.zeros(1, x.shape[1])]),
    "cat, normalised otherwise": lambda x: torch.cat([x, marked(x.still, Normalization(1 / 255, None, None, 2))]),
    "cat, cast otherwise": lambda x: torch.cat([x, x.half()]),
    "integers": lambda x: x.long(),
    "to integers": lambda x: x.to(torch.uint8),
    "numpy": lambda x: x.numpy(),
    "array": np.asarray,
    "list": lambda x: x.tolist(),
    "number": lambda x: x[0].max().item(),
    "dlpack": lambda x: x.__dlpack__(),
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float32),
    "tensor": lambda x: torch.tensor(x),
    "asarray": lambda x: torch.asarray(x, dtype=torch.float32),
    "new_tensor": lambda x: torch.zeros(1).new_tensor(x),
    "vmap": lambda x: torch.vmap(lambda row: row.float() * 2)(x),
    "operator": lambda x: torch.ops.aten.mul.Tensor(x, 2.0),
    "gradient": lambda x: setattr(x, "requires_grad", True),
    "gradient, by a method": lambda x: x.requires_grad_(),
    "attribute": lambda x: setattr(x, "data", torch.zeros(1)),
    "no attribute": lambda x: delattr(x, "grad"),
    "linear": lambda x: torch.nn.functional.linear(x.float(), torch.zeros(2, x.shape[1])),
}


@pytest.mark.parametrize("still", [False, True], ids=["frames", "still"])
@pytest.mark.parametrize("kind", KEEPING)
def test_rows_keep_the_mark(kind: str, still: bool) -> None:
    x = marked(still).half()
    found = KEEPING[kind](x)
    assert type(found) is BytePixels
    assert (found.normalization, found.still, found.casts) == (CLIP, still, (torch.float16,))
    plain = KEEPING[kind](x.unmarked())
    assert torch.equal(found.unmarked(), plain) and type(found.unmarked()) is torch.Tensor
    assert torch.equal(found.pixels(), KEEPING[kind](x.pixels()))


@pytest.mark.parametrize("kind", CASTS)
def test_casts_are_remembered(kind: str) -> None:
    x = marked()
    found, wanted = CASTS[kind](x), CASTS[kind](x.pixels())
    assert type(found) is BytePixels and found.dtype == torch.uint8 and found.is_floating_point()
    assert found.pixels().dtype == wanted.dtype and torch.equal(found.pixels(), wanted)


@pytest.mark.parametrize("still", [False, True], ids=["frames", "still"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_compute_with_bytes_raises(kind: str, still: bool) -> None:
    x = marked(still)
    before = x.unmarked().clone()
    with pytest.raises(TypeError, match="fusedvit: .* on BytePixels.*pixels"):
        REFUSED[kind](x)
    assert torch.equal(x.unmarked(), before)


def test_what_refuses_names_the_attribute() -> None:
    with pytest.raises(TypeError, match="^fusedvit: setting requires_grad on BytePixels to True"):
        marked().requires_grad = True
    with pytest.raises(TypeError, match="^fusedvit: deleting grad on BytePixels"):
        del marked().grad


def test_a_reentrant_checkpoint() -> None:
    """It detaches what it is given, and says that no gradient is wanted."""
    x, seen, scale = marked(), list[Any](), torch.ones((), requires_grad=True)
    assert x.requires_grad_(False) is x

    def run(pixels: Any, factor: torch.Tensor) -> torch.Tensor:
        seen.append(pixels)
        return pixels.pixels().sum() * factor

    checkpoint(run, x, scale, use_reentrant=True).backward()
    assert torch.equal(scale.grad, x.pixels().sum())
    assert [(type(p), p.requires_grad) for p in seen] == [(BytePixels, False)] * 2


def test_still_images_join_video() -> None:
    still, video = marked(still=True), marked()
    joined = torch.cat([still, video])
    assert type(joined) is BytePixels and not joined.still
    assert torch.equal(joined.pixels(), torch.cat([still.pixels(), video.pixels()]))


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loaders_keep_the_mark(workers: int) -> None:
    images = [marked(), marked(still=True)]
    rows = next(iter(DataLoader(images[:1], batch_size=None, num_workers=workers)))
    assert type(rows) is BytePixels and torch.equal(rows.unmarked(), images[0].unmarked())
    batch = next(iter(DataLoader([marked(), marked()], batch_size=2, num_workers=workers)))
    assert type(batch) is BytePixels and batch.shape == (2, *images[0].shape)


@pytest.mark.parametrize(
    "rescale, mean, std", [(1 / 255, MEAN, STD), (1 / 127.5, 0.5, 0.5), (None, MEAN, STD), (1 / 255, None, None)]
)
@pytest.mark.parametrize("still", [False, True])
def test_pixels_are_what_the_processors_make(rescale: Any, mean: Any, std: Any, still: bool) -> None:
    """transformers' expressions, of its two backends."""
    video = Normalization(rescale, mean, std, patch=2)
    x = marked(still, video)
    frames = x.unmarked().view(ROWS, 3, 1 if still else 2, 2, 2).permute(0, 2, 1, 3, 4)  # [P, t, C, p, p]
    one = _torchvision(frames, rescale, mean, std), _pil(frames.numpy(), rescale, mean, std)
    for backend, values in zip(("torchvision", "pil"), one, strict=True):
        values = values.permute(0, 2, 1, 3, 4).expand(-1, -1, 2, -1, -1).reshape(ROWS, -1)
        found = BytePixels.mark(x.unmarked(), Normalization(rescale, mean, std, 2, backend=backend), still).pixels()
        assert found.dtype == torch.float32 and torch.equal(found, values)


def _torchvision(images: torch.Tensor, rescale: Any, mean: Any, std: Any) -> torch.Tensor:
    if mean is None:
        return images * rescale
    mean, std = (torch.as_tensor(value).expand(3) * (1.0 / rescale if rescale else 1.0) for value in (mean, std))
    return images.to(torch.float32).sub(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


def _pil(images: np.ndarray, rescale: Any, mean: Any, std: Any) -> torch.Tensor:
    from transformers import image_transforms

    image = np.moveaxis(images, 2, 0).reshape(3, -1, 1)  # one image [C, H, W]
    if rescale is not None:
        image = image_transforms.rescale(image, rescale, input_data_format="channels_first")
    if mean is not None:
        image = image_transforms.normalize(image, mean, std, input_data_format="channels_first")
    moved = np.moveaxis(images, 2, 0).shape
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(image.reshape(moved), 0, 2)))


@pytest.mark.parametrize("backend", ["torchvision", "pil"])
def test_affine_map_is_what_the_processor_does(backend: str) -> None:
    n = Normalization(1 / 255, MEAN, STD, patch=2, backend=backend)
    factor, shift = n.affine()
    x = BytePixels.mark(torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 12), n, True)
    wanted = x.unmarked().double().view(256, 3, 4) * factor[:, None] + shift[:, None]
    found = x.pixels().view(256, 3, 2, 4)[:, :, 0].double()
    assert (found - wanted).abs().max() < 1e-6 and factor.dtype == torch.float64


@pytest.mark.parametrize(
    "options, said",
    [
        ({"std": (1.0, 0.0, 1.0)}, r"std must not be 0, got \(1.0, 0.0, 1.0\)"),
        ({"rescale_factor": 0}, "rescale_factor must not be 0, got 0"),
        ({"rescale_factor": -0.0, "mean": None, "std": None}, "rescale_factor must not be 0, got -0.0"),
        ({"rescale_factor": float("nan")}, "rescale_factor must be finite, got nan"),
        ({"mean": 10**400}, "mean must be finite, got inf"),
        ({"rescale_factor": 1e-46}, "pixels must be within the range of torch.float32, got rescale_factor 1e-46"),
        ({"rescale_factor": 1e37, "mean": None, "std": None}, "within the range of torch.float32, got .* 1e.37"),
        ({"std": 1e-46}, "within the range of torch.float32, got rescale_factor 0.0.*, mean 0.4.*, std 1e-46"),
        ({"mean": 1e38, "std": 1e-3}, r"within the range of torch.float32, got .*, mean 1e\+38, std 0.001"),
        ({"mean": (1.0, 2.0)}, "mean must have 3 values"),
        ({"std": None}, "both"),
        ({"patch": 0}, "patch must be at least 1"),
        ({"backend": "numpy"}, "backend must be one of"),
        ({"std": (float("nan"),) * 3}, "std must be finite, got nan"),
        ({"mean": float("inf")}, "mean must be finite, got inf"),
        ({"mean": ("a",) * 3}, "mean must be a number, got str"),
        ({"mean": "abc"}, "mean must be a number, got str"),
        ({"patch": "x"}, "patch must be an int, got str"),
        ({"rescale_factor": "1"}, "rescale_factor must be a number, got str"),
    ],
)
def test_normalization_that_no_processor_has(options: dict[str, Any], said: str) -> None:
    error = TypeError if "got str" in said else ValueError
    with pytest.raises(error, match=f"^fusedvit: .*{said}"):
        Normalization(**({"rescale_factor": 1 / 255, "mean": MEAN, "std": STD, "patch": 2} | options))


@pytest.mark.parametrize("backend", ["torchvision", "pil"])
@pytest.mark.parametrize(
    "numbers", [(1 / 255, 1.0, 1e-37), (1 / 255, 1e35, 1e35), (1e-36, 0.5, 0.5), (1e35, 1.0, 1.0)], ids=str
)
def test_pixels_of_any_normalization_are_finite(backend: str, numbers: tuple[float, float, float]) -> None:
    """Near the ends of what is accepted."""
    n = Normalization(*numbers, patch=2, backend=backend)
    bytes_ = torch.tensor([0, 255], dtype=torch.uint8)[:, None].repeat(1, 12)
    assert n.apply(bytes_, still=True).isfinite().all()


def test_what_cannot_be_marked() -> None:
    with pytest.raises(TypeError, match=r"uint8, got torch.float32"):
        BytePixels.mark(torch.zeros(4, 24), CLIP)
    with pytest.raises(ValueError, match=r"12 bytes, got shape \(4, 24\)"):
        BytePixels.mark(torch.zeros(4, 24, dtype=torch.uint8), CLIP, still=True)
    rows = torch.zeros(4, 24, dtype=torch.uint8)
    for wrong, error, said in (
        ((5,), TypeError, "normalization must be a Normalization, got int"),
        ((Normalization,), TypeError, "normalization must be a Normalization, got the class Normalization"),
        ((CLIP, "yes"), TypeError, "still must be a bool, got str"),
        ((CLIP, False, 5), TypeError, "casts must be a tuple of torch.dtype, got int"),
        ((CLIP, False, ("x",)), TypeError, r"casts must be a tuple of torch.dtype, got \['str'\]"),
        ((CLIP, False, (torch.int8,)), ValueError, r"casts must be to dtypes of floats, got \(torch.int8,\)"),
    ):
        with pytest.raises(error, match=f"^fusedvit: {said}$"):
            BytePixels.mark(rows, *wrong)
