"""What a tuner with minutes, not hours, does first and leaves out, and how long it will take.

order     : the flagship towers' blocks at the usual budgets, their mergers, other towers, other budgets
shortlist : the heuristic's own choice, the few that the cost model thinks best, plain Triton's choice
estimate  : distinct compilations by their seconds, timings by the roofline floor
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from fusedvit.bench.cases import rotated_sets
from fusedvit.bench.questions import Candidate, Question, compilation, contents_of, layouts
from fusedvit.bench.roofline import attention_cost, linear_cost
from fusedvit.bench.timing import LEAST_ROUNDS, WARM_UPS
from fusedvit.kernels import backends
from fusedvit.kernels.backends import Key
from fusedvit.kernels.hopper import attention_configs
from fusedvit.kernels.hopper.attention_configs import HopperAttentionConfig
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig, hopper_gemm_mean_us
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig
from fusedvit.kernels.hopper.gemm_swap_ab_configs import mean_us as swap_ab_mean_us
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.spec import VisionSpec

BEST, BEST_OF_LONG = 3, 2  # by the cost model, beside the heuristics' choices; of what takes long to time
USUAL = range(256, 16384 + 1)  # budgets, patch tokens
PLAIN_ROWS = (
    2048  # up to which plain Triton is timed where another backend is the heuristics' choice: it takes 1.1 to 3 x
)
PRICED = HopperGemmConfig, HopperSwapABConfig  # configurations whose times a cost model knows
MERGERS = ("merger", "downsample")
PLAIN = "triton"
# Forms of products that no cost model knows: they are timed.
UNPRICED = tuple(
    f.name for f in backends.BACKENDS if f.op == backends.LINEAR and f.name != PLAIN and f.config not in PRICED
)

# Seconds, of a core for a compilation and its check (a busy CPU took 2 to 7 s for Gluon, 1 s for plain Triton), of the
# GPU's process for a question's data and the winner's check, and for a candidate's load and capture: assumed.
COMPILE_S = {
    backends.LINEAR: {PLAIN: 1.3, "hopper": 3.8},
    backends.ATTENTION: {PLAIN: 2.0, "hopper": 5.5},
}
START_S, QUESTION_S, CANDIDATE_S = 8.0, 0.05, 0.012
OVER_FLOOR = 1.5  # what an operation takes of its floor


def in_waves(asked: Iterable[Question], flagships: Collection[VisionSpec]) -> list[list[Question]]:
    """What matters most first: the flagships at the usual budgets, the other towers there, other budgets. In each,
    blocks come before mergers, and powers of two before the budgets between them."""

    def place(question: Question) -> tuple[int, bool, bool]:
        merger = question.task.name.startswith(MERGERS)
        rows = question.task.key.rows * (question.spec.merge_unit if merger else 1)
        wave = 2 if rows not in USUAL else int(question.spec not in flagships)
        return wave, merger and wave < 2, rows & (rows - 1) > 0

    return [list(wave) for _, wave in groupby(sorted(asked, key=place), key=lambda question: place(question)[0])]


def shortlist(question: Question, proposed: Sequence[Candidate], dtype: torch.dtype, target: Target) -> list[Candidate]:
    """Of `proposed`, the heuristic's choice first, what is worth timing; all where there is plain Triton alone, or what
    no model knows."""
    key, own = question.task.key, proposed[0]
    unpriced = [c for c in proposed if c.backend in UNPRICED]
    others = [c for c in proposed[1:] if c.backend not in (PLAIN, *UNPRICED)]
    if not others:
        return list(proposed)
    predicted = mean_us if key.op == backends.LINEAR else _attention_us
    best = BEST if key.rows <= USUAL.stop else BEST_OF_LONG
    others = sorted(others, key=lambda candidate: predicted(key, candidate.config, target))[:best] + unpriced
    if key.rows > PLAIN_ROWS and own.backend != PLAIN:
        return list(dict.fromkeys([own, *others]))
    plain = backends.backend_named(key.op, PLAIN)
    assert plain is not None, "every operation has a plain backend"
    fallback = Candidate(PLAIN, plain.heuristic(key, dtype, target, question.task.widest))
    return list(dict.fromkeys([own, *others, fallback]))


def _attention_us(key: Key, config: HopperAttentionConfig, target: Target) -> float:
    """What the heuristic's cost model says, over the contents that it judges by; 0 of a head that it does not know."""
    if key.k not in attention_configs.COSTS.get((config.consumers, config.block_n), {}):
        return 0.0
    held = attention_configs.contents(key.rows, key.kind)
    return sum(attention_configs.microseconds(config, *content, key.n, key.k, target.num_sms) for content in held)


def mean_us(key: Key, config: Any, target: Target) -> float:
    """As the heuristic chooses by: the mean over what a budget may hold."""
    if isinstance(config, HopperSwapABConfig):
        return swap_ab_mean_us(config, key.rows, key.n, key.k, target, key.kind)
    return hopper_gemm_mean_us(config, key.rows, key.n, key.k, key.kind)


@dataclass(frozen=True)
class Estimate:
    """Of a run from nothing: distinct compilations, seconds of these on so many cores, and of timing."""

    questions: int
    compilations: int
    compile_s: float
    timing_s: float

    def describe(self) -> str:
        return (
            f"{self.questions} questions, {self.compilations} compilations: about {self.compile_s:.0f} s to compile "
            f"and check, {self.timing_s:.0f} s to time"
        )


def estimate(
    asked: Sequence[Question], proposals: Callable[[Question], Sequence[Candidate]], dtype: torch.dtype, jobs: int
) -> Estimate:
    """What `asked` will take with `jobs` cores on a GPU as fast as an H200; constants above."""
    each: dict[str, float] = {}
    timing = 0.0
    for question in asked:
        proposed, key = proposals(question), question.task.key
        each |= {
            compilation(question, c): COMPILE_S[key.op].get(c.backend, COMPILE_S[key.op]["hopper"]) for c in proposed
        }
        timing += QUESTION_S + len(proposed) * (CANDIDATE_S + _timed_s(key, dtype))
    compile_s = START_S + sum(each.values()) / jobs if each else 0.0
    return Estimate(len(asked), len(each), compile_s, timing)


def _timed_s(key: Key, dtype: torch.dtype) -> float:
    """Seconds of the GPU for one candidate."""
    runs = LEAST_ROUNDS + WARM_UPS
    if key.op == backends.ATTENTION:
        floors = [attention_cost(list(lengths), key.n, key.k).floor_ms for lengths in layouts(key)]
        return OVER_FLOOR * runs * sum(floors) / 1e3
    sets = rotated_sets(key.n * key.k * dtype.itemsize, key.rows, torch.device("cuda"))
    return OVER_FLOOR * runs * len(contents_of(key.rows)) * sets * linear_cost(key.rows, key.n, key.k).floor_ms / 1e3
