"""How kernels are launched that go over rows: norms, and rows put in another order.

They begin before the last launch has ended (programmatic dependent launch). A program waits before it reads anything,
also one without rows: what is complete here is complete for whoever waits for this launch. The next one may begin as
soon as all programs of this one have.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusedvit.kernels.configs import Target, overlaps


@dataclass(frozen=True)
class RowsConfig:
    """`max_programs` bounds the persistent grid; `overlap` as in `LinearConfig`."""

    max_programs: int
    overlap: bool = False

    def options(self) -> dict[str, bool]:
        """The kernel's `OVERLAP`, and what Triton has to know of it; its interpreter has nothing to overlap."""
        early = self.overlap and not triton.knobs.runtime.interpret
        return {"OVERLAP": True, "launch_pdl": True} if early else {"OVERLAP": False}


def rows_config(rows: int, target: Target) -> RowsConfig:
    """The schedule for a budget of `rows` rows."""
    return RowsConfig(4 * target.num_sms, overlaps(rows, target))


@triton.jit
def _begin(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
