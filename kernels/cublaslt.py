"""`kernels.linear` as cuBLASLt does it, through PyTorch: a product alone, or with the bias that is its own epilogue.

    out[t, n] = sum_k x[t, k] w[n, k] + bias[n]        fp32 accumulation, rounded once

cuBLASLt has more: GELU. No layer has that without a norm folded into its product before it, and PyTorch's operator is
a private one that means tanh on the GPU and erf on the CPU. fp32 is left out: whether its products are TF32 is a
setting of the process, which may change under us and is nobody's to change but the user's.

All T rows of the buffers are computed, as cuBLAS reads no count from the device. Rows do not meet in a product, so that
whatever lies past the count changes nothing before it, and what is written there is as undefined as `kernels.linear`
has it. But a replay costs what its budget costs, not its content; and cuBLAS chooses by T how it divides a product, on
which the last bits depend: an eager run gives a replay's bits only in buffers of as many rows (see `Backend.library`).

Of PyTorch's settings, fp16 sums (`allow_fp16_accumulation`, off unless asked for) are refused. Where K is split,
`allow_*_reduced_precision_reduction`, on unless asked otherwise, lets cuBLAS add the parts in 16 bits: the tuner takes
what is within the tolerance rule all the same, and without it sums are only better.

Inside a capture PyTorch gives cuBLAS a workspace from the graph's pool (32 MiB on Hopper), kept by thread and stream:
who multiplies eagerly on the capturing stream, beside a replay, shares it (pytorch/pytorch#193402).
"""

from dataclasses import dataclass

import torch

from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.launch import only_compiling

DTYPES = (torch.bfloat16, torch.float16)
MULTIPLE = 8  # of columns: with others, rows 16 bytes apart or not, cuBLAS rounded more than once (K = 3420 on an H200)


@dataclass(frozen=True)
class CublasLtConfig:
    """Nothing to choose: cuBLASLt does by itself. No `block_n` either, as no statistics are written."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    config: CublasLtConfig,
) -> torch.Tensor:
    """See `kernels.linear.linear`; `num_rows` is not read. Where rows of `out` lie apart, or there is one row alone,
    PyTorch writes the bias first and lets cuBLAS add the product: right as well, in two launches.

    Raises:
        ValueError: what `unsupported` says, before any launch.
        RuntimeError: sums of fp16 are allowed.
    """
    reason = unsupported(epilogue, x)
    if reason:
        raise ValueError(f"linear in its cublaslt form takes {reason}")
    assert weight.shape[1] == x.shape[1] and out.shape == (x.shape[0], weight.shape[0]), (
        f"x {x.shape}, weight {weight.shape}, out {out.shape}"
    )
    if x.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        raise RuntimeError("torch.backends.cuda.matmul.allow_fp16_accumulation is on: sums would be of 16 bits")
    if only_compiling():
        return out
    if epilogue.bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(epilogue.bias, x, weight.t(), out=out)


def unsupported(e: Epilogue, x: torch.Tensor) -> str:
    """Why this product and what follows it cannot run here, or ""."""
    if x.dtype not in DTYPES:
        return f"operands of 16 bits only, got {x.dtype}"
    if x.shape[1] % MULTIPLE:
        return f"rows of whole 16 bytes, got {x.shape[1]} columns"
    parts = {name: getattr(e, name) is not None for name in ("norm", "taps", "rope", "residual", "stats")}
    parts[e.activation] = e.activation != "none"
    more = ", ".join(name for name, there in parts.items() if there)
    if more:
        return f"a bias at most behind the product, got {more}"
    if e.bias is not None and e.bias.dtype != x.dtype:
        return f"a bias of {x.dtype}, got {e.bias.dtype}"
    return ""
