"""The encoder called directly, on an op table of one's choice: what the kernel checks are made of."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from fusedvit.families.base import Family
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.buffers import Capacity, allocate
from fusedvit.model.encoder import EncoderOutputs, encode
from fusedvit.model.ops import Ops
from fusedvit.model.plan import plan_for
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime.inputs import Item

H100 = Target(90, 132, 227 * 1024)  # whose tiles are taken where there is no GPU to ask


def encode_once(
    spec: VisionSpec,
    family: Family,
    parameters: Mapping[str, torch.Tensor],
    pixels: torch.Tensor,
    items: Sequence[Item],
    ops: Ops,
) -> EncoderOutputs:
    """Prepare the weights and run `ops` on pixels `[P, C*tp*p*p]`, in buffers of exactly their size."""
    weights = prepare(spec, family.names, family.source(parameters))
    plan = plan_for(spec, len(pixels), pixels.dtype, H100)
    buffers = allocate(spec, Capacity.of(items, plan.layout(spec)), pixels.dtype, pixels.device, pixels)
    buffers.grid.copy_(torch.tensor([[item.t, item.h, item.w] for item in items]))
    with torch.inference_mode():
        return encode(spec, weights, buffers, ops, plan)


def kernel_calls(handle: Any) -> dict[str, int]:
    """By operation, what one call of a fused tower launches on a GPU. Nothing is computed: all tensors are meta."""
    calls: Counter[str] = Counter(fingerprint=int(handle.config.watch_data))

    def noted(name: str) -> Callable[..., Any]:
        def operation(*args: Any) -> None:
            calls[name] += 1

        return operation

    table = Ops("count", **{f.name: noted(f.name) for f in fields(Ops) if f.name != "name"})
    spec, merge = handle.spec, handle.spec.merge_size
    parameters = {name: parameter.to("meta") for name, parameter in handle.tower.named_parameters()}
    pixels = torch.empty(merge * merge, spec.patch_width, device="meta")
    encode_once(spec, handle.family, parameters, pixels, [Item(1, merge, merge)], table)
    return dict(calls)
