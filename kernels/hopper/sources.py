"""Which files each form in Gluon is made of: what was timed is known by them. Read only where Gluon is there."""

from fusedvit.kernels.hopper import (
    attention,
    attention_configs,
    attention_consumer,
    attention_smem,
    gemm,
    gemm_epilogue,
    gemm_swap_ab,
)

ATTENTION = (
    attention,
    attention_smem,
    attention_smem,
    attention_consumer,
    attention_smem,
    attention_configs,
    attention_consumer,
    attention_consumer,
    attention_consumer,
    attention_consumer,
)
LINEAR = (gemm, gemm, gemm_epilogue, gemm, gemm, gemm)
TRANSPOSED = (gemm_swap_ab, gemm_swap_ab, gemm_swap_ab, gemm_swap_ab, gemm_epilogue)
