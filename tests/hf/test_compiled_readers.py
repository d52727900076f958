"""Compiled code, and code that is traced, reads records whose hidden states nobody has read yet."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

import fusedvit
from fusedvit.outputs.unread import CannotRead
from tests.support.towers import GRIDS, Call, copy_of, error_of, tiny_tower


def set_anew(record: Any) -> Any:
    record.hidden_states = tuple(h * 2 for h in record.hidden_states)
    return record.hidden_states[1]


def set_unread(record: Any) -> Any:
    record["hidden_states"] = (record.last_hidden_state * 2,)
    return record[-1][0]


READERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda r: r.hidden_states[-2] * 2,
    "key": lambda r: r["hidden_states"][1] * 2,
    "get": lambda r: r.get("hidden_states")[1] * 2,
    "tuple": lambda r: r.to_tuple()[-1][1] * 2,
    "slice": lambda r: r[1:][-1][0] * 2,
    "values": lambda r: list(r.values())[-1][1] * 2,
    "items": lambda r: dict(r.items())["hidden_states"][0] * 2,
    "copy": lambda r: r.copy()["hidden_states"][1] * 2,
    "rebuilt": lambda r: type(r)(**{name: value for name, value in r.items()}).hidden_states[0] * 2,
    "replaced": lambda r: dataclasses.replace(r, last_hidden_state=r.last_hidden_state * 2).hidden_states[1] * 2,
    "mapped": lambda r: _pytree.tree_map(lambda x: x * 2, r).hidden_states[1],
    "set anew": set_anew,
    "set unread": set_unread,
    "another field": lambda r: r.last_hidden_state * 2,
}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("within", [False, True], ids=["passed", "called within"])
@pytest.mark.parametrize("reader", READERS)
def test_compiled_code_reads_what_plain_code_does(reader: str, within: bool, mode: Any) -> None:
    original = tiny_tower()
    tower, call = copy_of(original), Call.of(original, GRIDS["images"])
    handle, read = fusedvit.fuse(tower), READERS[reader]

    def asked(tower: Any, pixels: torch.Tensor) -> Any:
        return tower(pixels, grid_thw=call.grid, output_hidden_states=True)

    with mode():
        expected = read(asked(original, call.pixels))
        whole = torch.compile(lambda tower, pixels: read(asked(tower, pixels * 1.0)), backend="eager")
        part = torch.compile(read, backend="eager")
        for _ in range(2):
            found = whole(tower, call.pixels) if within else part(asked(tower, call.pixels))
            assert error_of(found, expected) < 1e-4
    assert handle.stats()["fused"] == 2


def test_one_graph_says_what_to_do() -> None:
    tower = tiny_tower()
    call, _ = Call.of(tower, GRIDS["smallest"]), fusedvit.fuse(tower)
    head = torch.compile(lambda r: r.hidden_states[1] * 2, backend="eager", fullgraph=True)
    with torch.no_grad():
        record = tower(call.pixels, grid_thw=call.grid, output_hidden_states=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="read them before"):
            head(record)
        expected = record.hidden_states[1] * 2
        assert torch.equal(head(record), expected)


class Head(nn.Module):
    def __init__(self, record: Any) -> None:
        super().__init__()
        self.record = [record]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.record[0].hidden_states[1]


TRACERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "make_fx": lambda head, x: make_fx(head)(x),
    "make_fx before dispatch": lambda head, x: make_fx(head, pre_dispatch=True)(x),
    "torch.fx": lambda head, x: torch.fx.symbolic_trace(head),
    "torch.jit.trace": lambda head, x: torch.jit.trace(head, (x,), check_trace=False),
    "torch.export": lambda head, x: torch.export.export(head, (x,), strict=False).module(),
    "functionalize": lambda head, x: torch.func.functionalize(head),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_tracer_is_named(tracer: str) -> None:
    """It would record what computes hidden states; read before, they are constants, as those of Hugging Face's."""
    tower, x = tiny_tower(), torch.ones(1)
    call, _ = Call.of(tower, GRIDS["smallest"]), fusedvit.fuse(tower)
    with torch.no_grad():
        head = Head(tower(call.pixels, grid_thw=call.grid, output_hidden_states=True))
        with pytest.raises(CannotRead, match=r"^fusedvit: hidden_states of .* while .* traces: read them before that$"):
            TRACERS[tracer](head, x)(x)
        expected = head(x)
        assert torch.equal(TRACERS[tracer](head, x)(x), expected)


def test_a_transform_that_records_nothing() -> None:
    tower, x = tiny_tower(), torch.ones(2)
    call, _ = Call.of(tower, GRIDS["smallest"]), fusedvit.fuse(tower)
    with torch.no_grad():
        record = tower(call.pixels, grid_thw=call.grid, output_hidden_states=True)
        found = torch.vmap(lambda one: one * record.hidden_states[1])(x)
        assert torch.equal(found[0], record.hidden_states[1])
