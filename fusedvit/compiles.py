"""How many of our kernels this process has compiled."""

import sys

from triton.runtime.jit import JITFunction


def compiles() -> int:
    """Compiled kernels of `fusedvit.kernels` in this process, for all towers and devices: it stays after a warm-up."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("fusedvit.kernels.")]
    kernels = {id(v): v for module in modules for v in vars(module).values() if isinstance(v, JITFunction)}
    return sum(len(caches[0]) for kernel in kernels.values() for caches in list(kernel.device_caches.values()))
