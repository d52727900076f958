"""docs/corpus.md's `encode=` runs on a model as Qwen3-VL-Embedding is: an image's row is what it is alone."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from PIL import Image  # noqa: E402

import fusedvit  # noqa: E402
from fusedvit.bench.towers import random_weights_  # noqa: E402
from fusedvit.cli.towers import TINY  # noqa: E402
from tests.support.checkpoint import noisy_pictures, tiny_processor  # noqa: E402
from tests.support.processors import whole_processor  # noqa: E402

TOKENS = {"<|vision_start|>": 1, "<|image_pad|>": 2, "<|vision_end|>": 3, "<|video_pad|>": 4, "<pad>": 5}
CHAT = (
    "{% for message in messages %}{{ message.role }} {% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
)


def processor() -> Any:
    words = {"Represent": 6, "user": 7} | TOKENS
    return whole_processor(tiny_processor(), None, words, TOKENS, "<pad>", chat_template=CHAT)


def model() -> Any:
    text = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 48, "vocab_size": 200}
    ids = {f"{name}_token_id": TOKENS[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    ids |= {f"{name}_token_id": TOKENS[f"<|{name}_pad|>"] for name in ("image", "video")}
    found = transformers.Qwen3VLModel(
        transformers.Qwen3VLConfig(text_config=text, vision_config=dict(TINY), **ids)
    ).eval()
    random_weights_(found)
    return found


def example() -> Callable[..., Any]:
    page = (Path(__file__).resolve().parents[2] / "docs" / "corpus.md").read_text(encoding="utf-8")
    (code,) = (found for found in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def encode" in found)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code.split("\n\n\n")[0], "docs/corpus.md", "exec"), names)
    return names["encode"]


def test_qwen3_vl_embedding(tmp_path: Path) -> None:
    paths = sorted(noisy_pictures(tmp_path, 20, (40, 150), "05.png").glob("*.png"))
    whole, given, encode = model(), processor(), example()
    with torch.no_grad():
        wanted = {path: encode(whole, given, [Image.open(path)])[0] for path in paths if path.name != "05.png"}
    embedder = fusedvit.Embedder(whole, given, encode=encode)
    found = embedder({"path": list(map(str, paths))})
    for path, row, error in zip(paths, found["embedding"], found["error"], strict=True):
        assert bool(error) == (path.name == "05.png")
        if not error:
            torch.testing.assert_close(torch.as_tensor(row), wanted[path], atol=1e-5, rtol=1e-4)
    rows = torch.stack(list(wanted.values()))
    assert torch.cdist(rows, rows).fill_diagonal_(1).min() > 1e-2, "images differ"
    assert embedder.handle.stats()["fused"] == 2 and not embedder.handle.stats()["original"]
