"""Poison reaches everything that a run works in but what launches keep at zero."""

from fusedvit.bench.graph_stress import poison_buffers
from tests.support.encoding import every_buffer


def test_poison_is_everywhere_but_in_the_counters() -> None:
    buffers = every_buffer()
    for t in buffers.tensors().values():
        t.zero_()
    poison_buffers(buffers)
    for name, t in buffers.tensors().items():
        if name == "overlap.normalised":  # of towers in fp32, whose norms are not folded
            continue
        assert t.numel(), f"{name} is empty: nothing is tested"
        if name == "scratch.counters":
            assert not t.any()
        elif t.is_floating_point():
            assert t.isnan().all(), name
        else:
            assert t.all(), name
