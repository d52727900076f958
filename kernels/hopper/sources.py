"""Which files each form in Gluon is made of: what was timed is known by them. Read only where Gluon is there."""

from fusedvit.kernels.hopper import (
    alternating,
    alternating_warps,
    attention,
    attention_barriers,
    attention_boxes,
    attention_consumer,
    attention_parts,
    attention_places,
    attention_redo,
    attention_softmax,
    attention_spare,
    attention_sums,
    linear,
    linear_consumer,
    linear_epilogue,
    linear_parts,
    linear_producer,
    linear_split,
    transposed,
    transposed_parts,
    transposed_tail,
    transposed_warps,
)

ATTENTION = (
    attention,
    attention_barriers,
    attention_boxes,
    attention_consumer,
    attention_parts,
    attention_places,
    attention_redo,
    attention_softmax,
    attention_spare,
    attention_sums,
)
LINEAR = (linear, linear_consumer, linear_epilogue, linear_parts, linear_producer, linear_split)
TRANSPOSED = (transposed, transposed_parts, transposed_tail, transposed_warps, linear_epilogue)
ALTERNATING = (alternating, alternating_warps, linear_parts, *TRANSPOSED[1:])
