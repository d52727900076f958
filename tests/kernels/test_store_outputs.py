"""Outputs copied in one launch: the requested rows of every plane, and nothing else."""

from collections.abc import Callable

import pytest
import torch

from fusedvit.kernels.reference.store_outputs import store_outputs as store_outputs_ref
from fusedvit.kernels.store_outputs import store_outputs
from tests.kernels.support import NAN, random

OPS = {"kernel": store_outputs, "reference": store_outputs_ref}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize(
    "rows, room, width, planes, out, pitch",
    [
        (4, 4, 8, 1, 16, 16),
        (12, 64, 1152, 4, 2048, 2048),  # several programs a plane, the last of each in part
        (100, 256, 48, 3, 42, 48),  # padded rows
        (8, 16, 7, 2, 5, 5),  # neither a multiple of 16 bytes
        (20, 32, 16, 0, 16, 16),  # a tower without a merger
        (12, 16, 32, 9, 48, 64),  # more planes than a launch takes
    ],
)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_rows_of_every_plane(
    op: Callable[..., None],
    rows: int,
    room: int,
    width: int,
    planes: int,
    out: int,
    pitch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    hidden = random(room, width, device=device).to(dtype)
    merged = [random(room // 4, pitch, seed=p, device=device).to(dtype)[:, :out] for p in range(planes)]
    hidden[rows:] = NAN
    for plane in merged:
        plane[rows // 4 :] = NAN
    room_of_hidden = torch.full((rows + 1, width), 7.0, dtype=dtype, device=device)
    room_of_merged = [torch.full((rows // 4 + 1, out), 7.0, dtype=dtype, device=device) for _ in merged]
    op(hidden, merged, room_of_hidden[:rows], [plane[:-1] for plane in room_of_merged])
    assert torch.equal(room_of_hidden[:rows], hidden[:rows]) and (room_of_hidden[rows:] == 7).all()
    for got, plane in zip(room_of_merged, merged, strict=True):
        assert torch.equal(got[:-1], plane[: rows // 4]) and (got[-1] == 7).all()
