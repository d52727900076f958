"""The memory that a run works in: what there is of it has a name, and is counted."""

from dataclasses import replace

from fusedvit.kernels.metadata import Metadata
from fusedvit.model.buffers import OverlapBuffers
from tests.support.encoding import every_buffer


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
