"""Options of `fusedvit.fuse`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FuseConfig:
    """How a fused tower behaves.

    Attributes:
        strict: raise `RuntimeError` where a call would fall back to the original code.
        watch_data: notice writes that bypass autograd's version counter (`param.data.copy_(...)`) by a sampled
            fingerprint, read together with `grid_thw`. Without it such writes need `handle.refresh()`.
    """

    strict: bool = False
    watch_data: bool = True
