"""Prepared weights: the algebra that lets a norm and a rotation disappear into a product, and refreshing in place."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedvit.families.qwen3 import NAMES
from fusedvit.families.registry import family_of
from fusedvit.kernels.tma import rows_behind
from fusedvit.model import prepare_weights
from fusedvit.model.prepare_weights import _Maker, _rows, prepare, query_factor, rotary_rows
from fusedvit.model.spec import VisionSpec, rope_frequencies
from fusedvit.model.weights import ALIGNMENT, BOX_ROWS, EncoderWeights, LinearWeights, row_pitch
from tests.support.towers import bits, copy_of, tiny_tower

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def spec_of(tower: Any) -> VisionSpec:
    family = family_of(type(tower).__name__)
    assert family is not None
    return family.spec_from_config(tower.config)


def prepared(tower: Any, reuse: EncoderWeights | None = None) -> EncoderWeights:
    return prepare(spec_of(tower), NAMES, dict(tower.named_parameters()).__getitem__, reuse)


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of nested dataclasses and tuples, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from tensors_of(getattr(value, f.name), f"{path}.{f.name}")
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from tensors_of(part, f"{path}[{i}]")


def linears_of(value: Any) -> Iterator[LinearWeights]:
    if isinstance(value, LinearWeights):
        yield value
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from linears_of(getattr(value, f.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from linears_of(part)


def random_source(seed: int, n: int, k: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = {
        "fc.weight": torch.randn(n, k, generator=g, dtype=torch.float64) / k**0.5,
        "fc.bias": torch.randn(n, generator=g, dtype=torch.float64),
        "norm.weight": 1 + 0.5 * torch.randn(k, generator=g, dtype=torch.float64),
        "norm.bias": torch.randn(k, generator=g, dtype=torch.float64),
    }
    return {name: t.to(dtype) for name, t in made.items()}


def maker(source: dict[str, torch.Tensor], heads: int = 1, head_dim: int = 4) -> _Maker:
    return _Maker(VisionSpec(1, heads * head_dim, heads, head_dim, 8, 8, 4), source.__getitem__)


# a LayerNorm folded into the next product


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(2, 40), st.floats(-300, 300), st.floats(0.1, 50))
def test_folded_product_is_norm_then_linear(seed: int, n: int, k: int, offset: float, scale: float) -> None:
    """rstd (x W' - mean colsum) + b' = LayerNorm(x) W + b, also where the mean is hundreds of deviations away."""
    source = random_source(seed, n, k)
    made = maker(source)
    folded = made.folded("norm", made.plain("fc", "mlp"))
    assert folded.bias is not None
    x = offset + scale * torch.randn(7, k, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    expected = F.linear(
        F.layer_norm(x, (k,), source["norm.weight"], source["norm.bias"], 1e-6), source["fc.weight"], source["fc.bias"]
    )
    mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0)
    assert folded.colsum is not None
    ours = torch.rsqrt(variance + 1e-6) * (x @ folded.weight.T - mean * folded.colsum) + folded.bias
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fold_of_what_is_rounded(dtype: torch.dtype) -> None:
    """colsum is that of the rounded weight, so that a constant added to a row cancels whatever the dtype."""
    source = random_source(3, 24, 40, dtype)
    made = maker(source)
    folded = made.folded("norm", made.plain("fc", "mlp"))
    assert folded.bias is not None
    assert folded.colsum is not None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (folded.weight.dtype, folded.bias.dtype, folded.colsum.dtype) == (dtype, wide, wide)
    torch.testing.assert_close(folded.colsum.double(), folded.weight.double().sum(1), rtol=1e-6, atol=1e-6)
    exact = source["fc.weight"].double() * source["norm.weight"].double()
    assert folded.weight.equal(exact.to(dtype)), "the product is rounded once"
    b = source["fc.bias"].double() + source["fc.weight"].double() @ source["norm.bias"].double()
    torch.testing.assert_close(folded.bias.double(), b, rtol=1e-6, atol=1e-6)


# queries scaled for a softmax in base 2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_queries_come_out_scaled(dtype: torch.dtype) -> None:
    """Weight, bias and column sums of q's rows alone, and rounded once with the norm's weight."""
    heads, head_dim, k = 2, 72, 24
    c, source = heads * head_dim, random_source(5, 3 * heads * head_dim, k, dtype)
    made = maker(source, heads, head_dim)
    linear = made.plain("fc", "qkv")
    plain, scaled = (made.folded("norm", linear, f) for f in (None, query_factor(made.spec, 3 * c)))
    factor = torch.tensor([head_dim**-0.5 / math.log(2)] * c + [1.0] * 2 * c, dtype=torch.float64)
    exact = source["fc.weight"].double() * source["norm.weight"].double() * factor.unsqueeze(1)
    close = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 3e-7, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(scaled.weight.double(), exact, rtol=close / 2, atol=1e-7)
    assert scaled.weight[c:].equal(plain.weight[c:])
    assert plain.bias is not None and scaled.bias is not None and scaled.colsum is not None
    torch.testing.assert_close(scaled.bias.double(), plain.bias.double() * factor, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scaled.colsum.double(), scaled.weight.double().sum(1), rtol=1e-6, atol=1e-6)


def test_a_norm_of_heads_scales_queries_itself() -> None:
    """In fp32, so that its weight is not rounded once more; keys' stays what it is."""
    g = torch.Generator().manual_seed(6)
    source = {f"{name}.weight": torch.randn(64, generator=g).bfloat16() for name in ("q", "k")}
    both = maker(source, 2, 64).qk_norm(("q", "k"))
    assert both.dtype == torch.float32
    paired = [source[f"{name}.weight"].float().view(2, 32).T.flatten() for name in ("q", "k")]
    torch.testing.assert_close(both[0], paired[0] / 8 / math.log(2), rtol=1e-6, atol=0)
    assert both[1].equal(paired[1])


# rotary pairs as neighbours


def _half_rotation(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Hugging Face's: channel i turns with channel i + d / 2. `x` `[heads, d]`, `angle` `[d / 2]`."""
    angle = torch.cat([angle, angle])
    a, b = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat([-b, a], dim=-1) * angle.sin()


def _pair_rotation(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Ours: channel 2i turns with channel 2i + 1."""
    a, b = x[..., 0::2], x[..., 1::2]
    turned = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    return turned.flatten(-2)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from([4, 8, 24, 64, 72, 80]))
def test_pairing_preserves_scores(seed: int, heads: int, head_dim: int) -> None:
    """q . k and what the rotation does to it are the same in both orders; v stays as it is."""
    g = torch.Generator().manual_seed(seed)
    c = heads * head_dim
    weight = torch.randn(3 * c, c, generator=g, dtype=torch.float64)
    bias, colsum = torch.randn(2, 3 * c, generator=g, dtype=torch.float64)
    spec = VisionSpec(1, c, heads, head_dim, 8, 8, 4)
    paired = _rows(LinearWeights(weight, bias, colsum), rotary_rows(spec))
    x = torch.randn(2, c, generator=g, dtype=torch.float64)
    angles = torch.rand(2, head_dim // 2, generator=g, dtype=torch.float64) * 50

    def scores(linear: LinearWeights, rotate: Any) -> torch.Tensor:
        q, k, _ = F.linear(x, linear.weight, linear.bias).view(2, 3, heads, head_dim).unbind(1)
        return torch.stack([(rotate(q[0], angles[0]) * rotate(k[i], angles[i])).sum(-1) for i in range(2)])

    expected = scores(LinearWeights(weight, bias), _half_rotation)
    torch.testing.assert_close(scores(paired, _pair_rotation), expected, rtol=1e-9, atol=1e-9)
    assert paired.bias is not None
    assert paired.weight[2 * c :].equal(weight[2 * c :]) and paired.bias[2 * c :].equal(bias[2 * c :])
    assert paired.colsum is not None and paired.colsum.sort().values.equal(colsum.sort().values)


def test_frequencies_are_hugging_faces() -> None:
    tower = tiny_tower()
    ours = rope_frequencies(spec_of(tower))
    assert ours.dtype == torch.float32 and ours.equal(tower.rotary_pos_emb.inv_freq)
    assert prepared(tower.half()).inv_freq.equal(ours), "rounding the tower does not round the frequencies"


# the rest of a tower


def test_plain_weights_are_references() -> None:
    """A matrix that needs no change is not copied: it is the parameter's own memory. Vectors are copied."""
    tower = tiny_tower(intermediate_size=80)
    weights, block = prepared(tower), tower.blocks[1]
    pairs = [
        (weights.blocks[1].proj, block.attn.proj),
        (weights.blocks[1].fc2, block.mlp.linear_fc2),
        (weights.merger.fc1, tower.merger.linear_fc1),
        (weights.patch, tower.patch_embed.proj),
        (weights.deepstack[0].fc2, tower.deepstack_merger_list[0].linear_fc2),
    ]
    for ours, theirs in pairs:
        assert ours is not None
        assert ours.weight.data_ptr() == theirs.weight.data_ptr()
        assert ours.own == ("bias",) and ours.bias.equal(theirs.bias) and ours.bias.data_ptr() != theirs.bias.data_ptr()
    assert weights.position is not None and weights.position.data_ptr() == tower.pos_embed.weight.data_ptr()


def test_nothing_wants_gradients() -> None:
    tower = tiny_tower().requires_grad_(True)
    assert [path for path, t in tensors_of(prepared(tower)) if t.requires_grad] == []


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inner", [70, 71, 72])
def test_rows_start_at_multiples_of_16_bytes(inner: int, dtype: torch.dtype) -> None:
    tower = copy_of(tiny_tower(intermediate_size=inner, out_hidden_size=33), dtype)
    for linear in linears_of(prepared(tower)):
        if linear.weight.ndim == 2:
            assert linear.weight.stride(1) == 1
            assert linear.weight.stride(0) * linear.weight.element_size() % ALIGNMENT == 0
            assert linear.weight.data_ptr() % ALIGNMENT == 0
    fc1, fc2 = prepared(tower).blocks[0].fc1, prepared(tower).blocks[0].fc2.weight
    assert fc2[:, :inner].equal(tower.blocks[0].mlp.linear_fc2.weight)
    assert len(fc1.weight) == fc2.shape[1] == -(-inner * dtype.itemsize // 16) * 16 // dtype.itemsize
    assert fc1.bias is not None and not any(t.any() for t in (fc1.weight[inner:], fc1.bias[inner:], fc2[:, inner:]))


def test_misaligned_parameters() -> None:
    """A parameter that is a view into a checkpoint's buffer may start anywhere."""
    tower = tiny_tower(intermediate_size=80)
    expected = {path: t.clone() for path, t in tensors_of(prepared(tower))}
    for p in tower.parameters():
        p.data = torch.cat([p.detach().new_zeros(1), p.detach().flatten()])[1:].view(p.shape)
    weights = prepared(tower)
    for path, t in tensors_of(weights):
        assert t.equal(expected[path]), path
    assert all(w.weight.data_ptr() % ALIGNMENT == 0 for w in linears_of(weights) if w.weight.ndim == 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_refresh_rewrites_in_place(dtype: torch.dtype) -> None:
    """Captured graphs hold pointers: what we made stays where it is, and holds the new values."""
    tower = copy_of(tiny_tower(), dtype)
    old = prepared(tower)
    pointers = {path: t.data_ptr() for path, t in tensors_of(old)}
    before = {path: t.clone() for path, t in tensors_of(old)}
    for i, p in enumerate(tower.parameters()):
        p.data.mul_(1 + 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(dtype))
    fresh = prepared(tower)
    refreshed = prepared(tower, reuse=old)
    values = dict(tensors_of(refreshed))
    for path, t in tensors_of(fresh):
        assert bits(values[path]).equal(bits(t)), path
        assert values[path].data_ptr() == pointers[path], f"{path} moved"
        assert path == ".inv_freq" or not values[path].equal(before[path]), f"{path} did not change"


@pytest.mark.parametrize("change", ["dtype", "width"])
def test_refresh_does_not_reuse_what_does_not_fit(change: str) -> None:
    old = prepared(tiny_tower())
    tower = tiny_tower().half() if change == "dtype" else tiny_tower(intermediate_size=80)
    refreshed = prepared(tower, reuse=old)
    for path, t in tensors_of(prepared(tower)):
        assert bits(dict(tensors_of(refreshed))[path]).equal(bits(t)), path


def test_held_bytes_are_those_of_our_own_memory() -> None:
    tower = tiny_tower()
    weights = prepared(tower)
    theirs = {p.untyped_storage().data_ptr() for p in tower.parameters()}
    ours = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in tensors_of(weights)}
    assert weights.held_bytes() == sum(size for pointer, size in ours.items() if pointer not in theirs)


def test_missing_parameters_are_named() -> None:
    tower = tiny_tower()
    names = dict(tower.named_parameters())
    del names["blocks.1.norm2.bias"]
    with pytest.raises(KeyError, match=r"blocks\.1\.norm2\.bias"):
        prepare(spec_of(tower), NAMES, names.__getitem__)


# rows of many lines


def test_long_rows_start_at_a_line() -> None:
    assert row_pitch(4304, torch.bfloat16) == 4352 and row_pitch(4304, torch.bfloat16) * 2 % 128 == 0
    assert [row_pitch(n, torch.bfloat16) for n in (1152, 1020, 70)] == [1152, 1024, 72]
    assert row_pitch(4304, torch.float32) == 4320


def test_first_layers_have_memory_for_whole_boxes_of_rows_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our own copies alone: nobody's parameters are copied for it."""
    tower = copy_of(tiny_tower(intermediate_size=88), torch.float16)
    plain = prepared(tower).blocks[0]
    monkeypatch.setattr(prepare_weights, "_wants_lines", lambda weight: True)
    made = prepared(tower)
    fc1 = made.blocks[0].fc1
    assert rows_behind(plain.fc1.weight, BOX_ROWS) == fc1.weight.shape[0] == 88
    assert rows_behind(fc1.weight, BOX_ROWS) == 128 and fc1.own == plain.fc1.own
    assert torch.equal(fc1.weight, plain.fc1.weight) and torch.equal(fc1.bias, plain.fc1.bias)
    assert made.blocks[0].proj.weight.data_ptr() == tower.blocks[0].attn.proj.weight.data_ptr()
    again = prepared(tower, made).blocks[0].fc1.weight
    assert again.data_ptr() == fc1.weight.data_ptr() and rows_behind(again, BOX_ROWS) == 128


def test_the_second_layers_rows_are_put_at_lines_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = copy_of(tiny_tower(intermediate_size=1160), torch.float16)
    parameter = tower.blocks[0].mlp.linear_fc2.weight
    plain = prepared(tower).blocks[0].fc2
    assert plain.weight.data_ptr() == parameter.data_ptr() and plain.own == ("bias",)
    monkeypatch.setattr(prepare_weights, "_wants_lines", lambda weight: True)
    made = prepared(tower)
    lined = made.blocks[0].fc2
    assert lined.weight.stride() == (1216, 1) and set(lined.own) == {"weight", "bias"}
    assert torch.equal(lined.weight, parameter)
    with torch.no_grad():
        parameter.mul_(2)
    again = prepared(tower, made).blocks[0].fc2
    assert again.weight.data_ptr() == lined.weight.data_ptr() and torch.equal(again.weight, parameter)
