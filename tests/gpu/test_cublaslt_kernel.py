"""The linear layer in its cublaslt form on a GPU: the rule that the tuner holds it to, the same bits every time, in a
graph too, poison wherever nobody should look. A few seconds."""

from dataclasses import replace

import pytest
import torch

from fusedvit.graphs.capture import CudaCapture
from fusedvit.kernels.cublaslt import CublasLtConfig, linear
from fusedvit.kernels.reference.linear import linear as linear_ref
from tests.kernels.linear_cases import Fused, Layer, apart, fused, tensors
from tests.kernels.support import NAN, assert_rounded_once

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
CONFIG, REPEATS = CublasLtConfig(), 50
LAYERS = {
    "merger fc2": Layer(253, 4608, 4096),
    "merger fc2, few rows": Layer(49, 4608, 4096),  # where K is likely to be split
    "no bias": Layer(253, 4608, 4096, bias=False),
    "rows a line apart": Layer(1021, 4304, 1152),
    "one row": Layer(1, 1152, 4096),
    "rows of out apart": Layer(253, 1152, 1100),
}
CASES = [(name, BF16) for name in LAYERS] + [("merger fc2", FP16), ("merger fc2, few rows", FP16)]


def made(name: str, dtype: torch.dtype, device: torch.device, wide: torch.dtype | None = None) -> Fused:
    """Of `name`, with 70 rows of NaN past the count."""
    layer = LAYERS[name]
    arguments = fused(layer, tensors(layer, dtype, device), layer.rows + 70, wide)
    if name != "rows a line apart":
        return arguments
    return replace(arguments, x=apart(arguments.x, 4352), weight=apart(arguments.weight, 4352))


@pytest.mark.parametrize("name, dtype", CASES, ids=str)
def test_within_the_rule(name: str, dtype: torch.dtype, device: torch.device) -> None:
    out, _ = made(name, dtype, device).run(linear, CONFIG)
    twin, _ = made(name, dtype, device, wide=torch.float64).run(linear_ref, CONFIG)
    rows = LAYERS[name].rows
    assert_rounded_once(out[:rows], twin[:rows], "against the twin:")


@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_every_time_and_whatever_is_past_the_count(name: str, device: torch.device) -> None:
    arguments, rows = made(name, BF16, device), LAYERS[name].rows
    first = arguments.run(linear, CONFIG)[0][:rows]
    clean = replace(arguments, x=apart(arguments.x.nan_to_num(0.0), arguments.x.stride(0)))
    assert first.isfinite().all() and torch.equal(clean.run(linear, CONFIG)[0][:rows], first)
    for _ in range(REPEATS):
        assert torch.equal(arguments.run(linear, CONFIG)[0][:rows], first)


@pytest.mark.parametrize("name", ["merger fc2", "merger fc2, few rows", "no bias"])
def test_graphs_have_an_eager_runs_bits(name: str, device: torch.device) -> None:
    """Two graphs of one pool, as an encoder has them. One is reset; what was its memory is given to others, as far as
    PyTorch gives it up, and filled: the other's answer stays, every time."""
    arguments, rows = made(name, BF16, device), LAYERS[name].rows
    expected = arguments.run(linear, CONFIG)[0][:rows]
    out = torch.empty(arguments.x.shape[0], arguments.weight.shape[0], dtype=BF16, device=device)

    def run() -> None:
        linear(arguments.x, arguments.weight, arguments.num_rows, out, arguments.epilogue, CONFIG)

    capture = CudaCapture(device)
    first, second = capture.capture(run), capture.capture(run)
    for graph, times in ((first, REPEATS), (second, REPEATS)):
        for _ in range(times):
            out.fill_(NAN)
            graph.replay()
            assert torch.equal(out[:rows], expected)
        torch.cuda.synchronize()
        first.reset()
        torch.cuda.empty_cache()
        others = [torch.full((2**22,), NAN, device=device) for _ in range(8)]  # 16 MiB each
    second.replay()
    assert torch.equal(out[:rows], expected) and all(t.isnan().all() for t in others)
