"""The memory that a run works in: what there is of it has a name, and is counted."""

from dataclasses import replace

import torch

from fusedvit.kernels.metadata import Metadata
from fusedvit.model.buffers import Capacity, OverlapBuffers, allocate
from tests.support.encoding import every_buffer
from tests.support.specs import QWEN3_VL_8B


def test_every_tensor_is_named_and_counted() -> None:
    made = every_buffer()
    found = made.tensors()
    names = {"pixels", "grid", "row_counts", "hidden", "wide", "context", "stats"} | {
        f"merged.{i}" for i in range(len(made.merged))
    }
    names |= {f"meta.{name}" for name in Metadata.__annotations__} | {
        f"overlap.{name}" for name in OverlapBuffers.__annotations__
    }
    assert found.keys() == names | {"scratch.sums", "scratch.counters"}
    assert made.overlap is not None and found["overlap.inner"] is made.overlap.inner and found["grid"] is made.grid
    assert made.held_bytes() == sum(t.nbytes for t in found.values())
    without = replace(made, overlap=None)
    assert without.tensors().keys() == {name for name in found if not name.startswith("overlap.")}
    assert made.held_bytes() - without.held_bytes() == sum(t.nbytes for t in vars(made.overlap).values())


def test_a_part_has_the_shapes_of_a_smaller_run_in_the_same_memory() -> None:
    spec, smaller, cpu = replace(QWEN3_VL_8B, window=4), Capacity(8, 1, 2, 3, 2, 3, 2), torch.device("cpu")
    whole = allocate(spec, Capacity(16, 2, 3, 4, 5, 6, 7), torch.float16, cpu, overlap=(2, 16))
    part = whole.part(spec, smaller, overlapped=1).tensors()
    like = allocate(spec, smaller, torch.float16, cpu, overlap=(1, 8)).tensors()
    assert {name: t.shape for name, t in part.items()} == {name: t.shape for name, t in like.items()}
    assert all(t.data_ptr() == part[name].data_ptr() for name, t in whole.tensors().items())
    assert whole.part(spec, smaller).overlap is None
