"""The memory that a run works in: what there is of it has a name, and is counted."""

from dataclasses import replace

from fusedvit.kernels.metadata import Metadata
from fusedvit.model.buffers import Apart
from tests.support.encoding import every_buffer


def test_every_tensor_is_named_and_counted() -> None:
    made = every_buffer()
    found = made.tensors()
    names = {"pixels", "grid", "hidden", "wide", "context", "stats", "merged"}
    names |= {f"meta.{name}" for name in Metadata.__annotations__} | {f"apart.{name}" for name in Apart.__annotations__}
    assert found.keys() == names | {"scratch.sums", "scratch.counters"}
    assert made.apart is not None and found["apart.inner"] is made.apart.inner and found["grid"] is made.grid
    assert made.held_bytes() == sum(t.nbytes for t in found.values())
    without = replace(made, apart=None)
    assert without.tensors().keys() == {name for name in found if not name.startswith("apart.")}
    assert made.held_bytes() - without.held_bytes() == sum(t.nbytes for t in vars(made.apart).values())
