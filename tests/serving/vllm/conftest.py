"""What tests of vLLM share."""

import logging
from collections.abc import Callable

import pytest


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The one line with `part` in it that fusedvit has written into vLLM's log."""
    lines, handler = list[str](), logging.Handler(logging.INFO)
    handler.addFilter(lambda record: "fusedvit" in record.name)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])

    def line(part: str = "") -> str:
        (found,) = (line for line in lines if part in line)
        return found

    return line
