"""Images resized and cut into patches: the kernels and their reference against Pillow's and torch's bytes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from einops import rearrange

from fusedvit.kernels.patches import PatchLayout, Taps, patches_from_images
from fusedvit.kernels.reference.patches import patches_from_images as patches_from_images_ref
from fusedvit.pixels.resize import PILLOW, TORCH, Resizing

Image = pytest.importorskip("PIL.Image")
OPS = {"kernel": patches_from_images, "reference": patches_from_images_ref}

# (height, width) of the image, and of what it is resized to, in patches
SIZES = [
    ((13, 17), (2, 2)),
    ((5, 7), (4, 2)),  # larger
    ((1, 1), (2, 2)),
    ((1, 40), (2, 4)),
    ((40, 1), (4, 2)),
    ((31, 12), (2, 2)),  # Pillow may resize the height first
    ((31, 20), (2, 2)),
    ((8, 16), (2, 4)),  # unchanged
    ((8, 13), (2, 2)),  # one axis unchanged
]


def by_pillow(image: np.ndarray, height: int, width: int) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)))


def by_torch(image: np.ndarray, height: int, width: int) -> torch.Tensor:
    planes = torch.from_numpy(image).movedim(-1, 0)[None]
    resized = torch.nn.functional.interpolate(planes, (height, width), mode="bicubic", antialias=True)
    return resized[0].movedim(0, -1)


BACKENDS: dict[str, tuple[Resizing, Callable[[np.ndarray, int, int], torch.Tensor]]] = {
    "pillow": (PILLOW, by_pillow),
    "torch": (TORCH, by_torch),
}


def noise(*shape: int, sharp: bool = False) -> np.ndarray:
    """Bytes; sharp ones are 0 and 255 alone, which over- and undershoot."""
    values = np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)
    return (values // 128 * 255).astype(np.uint8) if sharp else values


def run(
    op: Callable[..., torch.Tensor],
    resizing: Resizing,
    images: torch.Tensor,
    grid: tuple[int, int, int],
    layout: PatchLayout,
    size: tuple[int, int] | None = None,
) -> torch.Tensor:
    """`op` with poison behind the rows that it may write."""
    height, width = images.shape[1:3]
    new = size or (grid[1] * layout.patch, grid[2] * layout.patch)
    down, across = (
        weights and Taps(*(torch.from_numpy(t).to(images.device) for t in weights[:2]), weights.bits)
        for weights in (resizing.weights(height, new[0]), resizing.weights(width, new[1]))
    )
    rows, columns = grid[0] * grid[1] * grid[2], images.shape[3] * layout.temporal * layout.patch**2
    out = torch.full((rows + 1, columns), 77, dtype=torch.uint8, device=images.device)
    op(images, down, across, layout, grid, out[:rows], resizing.down_first((height, width), new))
    assert (out[rows:] == 77).all()
    return out[:rows].cpu()


def rows_of(frames: torch.Tensor, layout: PatchLayout) -> torch.Tensor:
    """Merge-block order written out."""
    pattern = "(t tp) (h mh ph) (w mw pw) c -> (t h w mh mw) (c tp ph pw)"
    sides = {"tp": layout.temporal, "mh": layout.merge, "mw": layout.merge, "ph": layout.patch, "pw": layout.patch}
    return rearrange(frames, pattern, **sides)


@pytest.mark.parametrize("size, grid", SIZES)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize(
    "op, sharp", [(patches_from_images, True), (patches_from_images_ref, False), (patches_from_images_ref, True)]
)
def test_equals_the_backend(op, backend, size, grid, sharp, device) -> None:
    resizing, resize = backend
    layout = PatchLayout(4, 2, 1)
    image = noise(*size, 3, sharp=sharp)
    wanted = rows_of(resize(image, grid[0] * 4, grid[1] * 4)[None], layout)
    got = run(op, resizing, torch.from_numpy(image)[None].to(device), (1, *grid), layout)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_several_stills_in_any_memory_order(op, device) -> None:
    images = torch.from_numpy(noise(2, 7, 13, 3)).to(device)
    layout = PatchLayout(3, 2, 1)
    wanted = torch.cat([run(op, PILLOW, image[None], (1, 2, 2), layout) for image in images])
    planar = images.movedim(-1, 1).contiguous().movedim(1, -1)
    for given in (images, planar):
        assert torch.equal(run(op, PILLOW, given, (2, 2, 2), layout), wanted)


@pytest.mark.parametrize("frames", (1, 2, 3))
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_frames_of_a_patch(op, frames, device) -> None:
    """Of a video; its last frame fills the last patch."""
    layout, video = PatchLayout(4, 2, 2), noise(frames, 11, 18, 3)
    resized = [by_pillow(frame, 8, 16) for frame in video]
    resized += resized[-1:] * (frames % 2)
    grid = (len(resized) // 2, 2, 4)
    got = run(op, PILLOW, torch.from_numpy(video).to(device), grid, layout)
    assert torch.equal(got, rows_of(torch.stack(resized), layout))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_room_beyond_the_image_is_zero(op, device) -> None:
    layout, image = PatchLayout(4, 2, 1), noise(20, 30, 3)
    whole = torch.zeros(8, 16, 3, dtype=torch.uint8)
    whole[:7, :13] = by_pillow(image, 7, 13)
    got = run(op, PILLOW, torch.from_numpy(image)[None].to(device), (1, 2, 4), layout, size=(7, 13))
    assert torch.equal(got, rows_of(whole[None], layout))


def test_what_does_not_fit_is_refused(device) -> None:
    images = torch.zeros(1, 8, 8, 3, dtype=torch.uint8, device=device)
    taps = Taps(*(torch.from_numpy(t).to(device) for t in PILLOW.weights(8, 16)[:2]), 22)
    out = torch.empty(4, 48, dtype=torch.uint8, device=device)
    with pytest.raises(AssertionError, match="at most 2 x 2 patches of 4 pixels, got 16 x 16"):
        patches_from_images(images, taps, taps, PatchLayout(4, 2, 1), (1, 2, 2), out)
    with pytest.raises(AssertionError, match="expected rows"):
        patches_from_images(images, taps, taps, PatchLayout(4, 2, 1), (1, 4, 4), out)
