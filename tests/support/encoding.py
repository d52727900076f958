"""The encoder put together by hand, without Hugging Face's module around it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fusedvit.bench.graph_stress import poison_buffers
from fusedvit.families.registry import family_of
from fusedvit.kernels.epilogue import Scratch
from fusedvit.kernels.tile_configs import Target
from fusedvit.model import ops
from fusedvit.model.buffers import Capacity, EncoderBuffers, allocate
from fusedvit.model.encoder import EncoderOutputs, encode
from fusedvit.model.plan import EncoderPlan, plan_for
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.weights import EncoderWeights
from tests.support.specs import QWEN3_VL_8B
from tests.support.towers import Call, Grid, items_of, patches_of

Outputs = dict[str, torch.Tensor]


class Encoder:
    """A tower's spec and prepared weights with a table of operations, on buffers that may exceed their content."""

    def __init__(self, tower: Any, table: ops.Ops) -> None:
        family = family_of(type(tower).__name__)
        assert family is not None
        self.spec, self.ops = family.spec_from_config(tower.config), table
        parameter = next(tower.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        tensors = {**dict(tower.named_buffers()), **dict(tower.named_parameters())}
        self.weights: EncoderWeights = prepare(self.spec, family.names, family.source(tensors))

    def plan(self, tokens: int) -> EncoderPlan:
        return plan_for(self.spec, tokens, self.dtype, Target.of(self.device))

    def buffers(self, grid: Grid, spare: Sequence[int] = (0, 0, 0, 0), poisoned: bool = False) -> EncoderBuffers:
        """Buffers for `grid` and `spare` more tokens, items, frames, tiles."""
        layout = self.plan(patches_of(grid) + spare[0]).layout(self.spec)
        exact = Capacity.of(items_of(grid), layout)
        more = {"tokens": spare[0], "items": spare[1], "frames": spare[2], "tiles": spare[3]}
        if self.spec.window:
            more |= {"windows": spare[2], "window_tiles": spare[3]}
        if layout.short:
            more["short_tiles"] = spare[3]
        capacity = replace(exact, **{name: getattr(exact, name) + n for name, n in more.items()})
        made = allocate(self.spec, capacity, self.dtype, self.device)
        if poisoned:
            poison_buffers(made)
        return made

    def load(self, buffers: EncoderBuffers, grid: Grid, pixels: torch.Tensor) -> None:
        buffers.pixels[: patches_of(grid)] = pixels.to(self.device, self.dtype)
        buffers.grid.zero_()
        buffers.grid[: len(grid)] = torch.tensor(grid, dtype=torch.int32)

    def encode(self, buffers: EncoderBuffers) -> EncoderOutputs:
        with torch.no_grad():
            return encode(self.spec, self.weights, buffers, self.ops, self.plan(buffers.hidden.shape[0]))

    def run(self, buffers: EncoderBuffers, grid: Grid, pixels: torch.Tensor) -> Outputs:
        """The real rows of every output, copied."""
        self.load(buffers, grid, pixels)
        made = self.encode(buffers)
        tokens = patches_of(grid)
        merged = tokens // self.spec.merge_unit
        hidden = made.last_hidden_state(self.spec)
        rows = merged if self.spec.tail in ("downsample", "pool") else tokens
        named = {"last_hidden_state": hidden[:rows]}
        if self.spec.merged_outputs and self.spec.returns_hidden:
            named["pooler_output"] = made.pooled[:merged]
        if self.spec.tail == "merger":
            named |= {f"deepstack_features[{i}]": t[:merged] for i, t in enumerate(made.deepstack)}
        return {name: t.clone() for name, t in named.items()}

    def answer(self, grid: Grid, pixels: torch.Tensor) -> Outputs:
        return self.run(self.buffers(grid), grid, pixels)


def every_buffer() -> EncoderBuffers:
    """All that a tower of any family may have: windows, split products, packed cos/sin, overlapped mergers."""
    spec, cpu = replace(QWEN3_VL_8B, window=4), torch.device("cpu")
    made = allocate(spec, Capacity(16, 2, 3, 4, 5, 6, 7), torch.float16, cpu, overlap=(2, 16))
    return replace(made, scratch=Scratch.zeros(8, 8, cpu))


def hugging_face(tower: Any, grid: Grid, pixels: torch.Tensor) -> Outputs:
    """The original tower's outputs, in its own dtype."""
    parameter = next(tower.parameters())
    call = Call(pixels.to(parameter.device, parameter.dtype), torch.tensor(grid, device=parameter.device))
    return call.run(tower)
