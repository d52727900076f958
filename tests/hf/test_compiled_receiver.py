"""A compiled language model behind a fused tower: mixed traffic compiles each kind of request once."""

from typing import Any

import pytest
import torch

import fusedvit
from tests.support.towers import Grid, prompt, tiny_model

REQUESTS: dict[str, tuple[Grid, Grid]] = {
    "text": ([], []),
    "image": ([(1, 4, 6)], []),
    "video": ([], [(3, 4, 6)]),
    "both": ([(1, 4, 6)], [(2, 4, 8)]),
}
# Other sizes and numbers of items, of the same kinds.
LATER: list[tuple[Grid, Grid]] = [
    ([(1, 8, 4), (1, 6, 4)], []),
    ([], []),
    ([], [(2, 4, 10)]),
    ([(1, 6, 6)], [(4, 4, 4)]),
    ([(1, 4, 8)], []),
]


class Receiver:
    """Compiles a model's language model with a backend that counts, and runs what it is given as it is."""

    def __init__(self, model: Any) -> None:
        self.compiled = 0
        torch._dynamo.reset()
        language = model.model.language_model
        language.forward = torch.compile(language.forward, backend=self._backend, dynamic=True)

    def _backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.compiled += 1
        return graph.forward


def send(model: Any, images: Grid, videos: Grid, seed: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(**prompt(model.model.visual, images, videos, seed=seed), use_cache=False).logits


def traffic(model: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Graphs compiled by each of `LATER`, after one request of each kind, and their logits."""
    receiver = Receiver(model)
    for request in REQUESTS.values():
        send(model, *request)
    assert receiver.compiled > 0
    grown, logits = [], []
    for request in LATER:
        before = receiver.compiled
        logits.append(send(model, *request))
        grown.append(receiver.compiled - before)
    return grown, logits


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_mixed_traffic_compiles_no_more_than_behind_the_original(kind: str) -> None:
    """Qwen3-VL's own code compiles two graphs more for a second text, whatever tower is before it."""
    other, model = tiny_model(kind), tiny_model(kind)
    handle = fusedvit.fuse(model, fusedvit.FuseConfig(strict=True))
    grown_before, expected = traffic(other)
    grown, logits = traffic(model)
    assert grown == grown_before
    assert grown[2:] == [0, 0, 0]
    for ours, want in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-3, atol=1e-4)
    assert handle.stats()["original"] == {}


def test_the_count_sees_features_of_another_kind() -> None:
    """The guard of the test above."""
    model = tiny_model()
    fusedvit.fuse(model)
    receiver = Receiver(model)
    for _ in range(2):
        send(model, *REQUESTS["image"])
    first = receiver.compiled
    visual, forward = model.model.visual, type(model.model.visual).forward

    def in_double(*args: Any, **kwargs: Any) -> Any:
        answer = forward(visual, *args, **kwargs)
        answer.deepstack_features = [features.double() for features in answer.deepstack_features]
        return answer

    visual.forward = in_double
    send(model, *REQUESTS["image"])
    assert receiver.compiled > first
