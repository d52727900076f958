"""Dynamo's own driver and adapter, around the fused encoder. Runs where `make test-serving` has put Dynamo's wheel."""

import asyncio
import base64
import contextlib
import importlib.util
import io
import json
import shutil
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("dynamo.common.multimodal.image_loader", reason="Dynamo is not installed")
pytest.importorskip("transformers")

import numpy as np  # noqa: E402
from PIL import Image as Pillow  # noqa: E402

from fusedvit.cli.towers import TINY  # noqa: E402
from fusedvit.errors import InputError  # noqa: E402
from tests.support.checkpoint import tiny_checkpoint, tiny_processor, whole_model  # noqa: E402

CUSTOM = "dynamo.vllm.multimodal_utils.custom_encoder"
SIZES = ((64, 96), (160, 64), (96, 96))


def _without_vllm() -> None:
    """Packages whose `__init__` imports vLLM become empty ones over the same files; vLLM's prompts are dictionaries."""
    for name in ("dynamo.vllm", "dynamo.vllm.multimodal_utils", CUSTOM):
        found = importlib.util.find_spec(name)
        assert found is not None and found.submodule_search_locations is not None
        package = types.ModuleType(name)
        package.__path__ = list(found.submodule_search_locations)
        sys.modules[name] = package
    inputs: Any = types.ModuleType("vllm.inputs")
    inputs.TokensPrompt = inputs.EmbedsPrompt = dict
    sys.modules |= {"vllm": types.ModuleType("vllm"), "vllm.inputs": inputs}


@pytest.fixture(scope="module")
def dynamo() -> Any:
    """(our module, Dynamo's driver, its adapter for Qwen3-VL)"""
    before = {name: module for name, module in sys.modules.items() if name.startswith(("dynamo.vllm", "vllm"))}
    _without_vllm()
    ours = importlib.import_module("fusedvit.serving.dynamo")
    driver = importlib.import_module(f"{CUSTOM}.async_encoder").AsyncVisionEncoder
    adapter = importlib.import_module(f"{CUSTOM}.adapter.qwen3_vl").Qwen3VLNativeAdapter
    yield ours, driver, adapter
    for name in [name for name in sys.modules if name.startswith(("dynamo.vllm", "vllm", "fusedvit.serving.dynamo"))]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), longest=512)


def _pictures() -> list[Any]:
    rng = np.random.default_rng(0)
    return [Pillow.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]


def _url(picture: Any) -> str:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _encoded(dynamo: Any, cls: str, checkpoint: Path, requests: list[list[Any]], errors: bool = False) -> list[Any]:
    """What Dynamo's driver gives for concurrent requests, or also their `errors`."""
    ours, driver, _ = dynamo
    encoder = driver(getattr(ours, cls)())
    encoder.load(str(checkpoint))
    try:

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(encoder.encode(urls) for urls in requests), return_exceptions=errors)

        return asyncio.run(all_of_them())
    finally:
        encoder.shutdown()


def _expected(checkpoint: Path) -> list[torch.Tensor]:
    """Hugging Face's own rows of each picture, with its deepstack features."""
    model = whole_model(checkpoint)
    rows = []
    for picture in _pictures():
        inputs = tiny_processor(512)(images=[picture], return_tensors="pt")
        with torch.no_grad():
            found = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        rows.append(torch.cat([found.pooler_output, *found.deepstack_features], 1))
    return rows


def test_requests_through_dynamo(dynamo: Any, checkpoint: Path) -> None:
    urls, expected = [_url(picture) for picture in _pictures()], _expected(checkpoint)
    found = _encoded(dynamo, "FusedVisionEncoder", checkpoint, [urls, urls[1:], urls[:1]])
    assert [len(artifacts) for artifacts in found] == [3, 2, 1]
    for artifacts, wanted in zip(found, (expected, expected[1:], expected[:1]), strict=True):
        for artifact, rows in zip(artifacts, wanted, strict=True):
            torch.testing.assert_close(artifact.embeddings, rows, atol=1e-4, rtol=1e-4)
    config = types.SimpleNamespace(hf_config=types.SimpleNamespace(vision_config=types.SimpleNamespace(
        spatial_merge_size=2)))  # fmt: skip
    prompt = dynamo[2](config).prepare_prompt([1, 2], found[0])["multi_modal_data"]["image"]
    torch.testing.assert_close(prompt["image_embeds"], torch.cat(expected), atol=1e-4, rtol=1e-4)
    assert prompt["image_grid_thw"].tolist() == [[1, h // 16, w // 16] for h, w in SIZES]


def test_rows_for_text_decoders(dynamo: Any, checkpoint: Path) -> None:
    (artifacts,) = _encoded(dynamo, "FusedLinearEncoder", checkpoint, [[_url(p) for p in _pictures()]])
    for artifact, rows in zip(artifacts, _expected(checkpoint), strict=True):
        torch.testing.assert_close(artifact, rows[:, : TINY["out_hidden_size"]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "file:///etc/hostname", "data:text/plain;base64,AAAA"])
def test_a_bad_image_fails_its_request_alone(dynamo: Any, checkpoint: Path, url: str) -> None:
    first = _url(_pictures()[0])
    good, bad = _encoded(dynamo, "FusedVisionEncoder", checkpoint, [[first], [first, url]], errors=True)
    assert len(good) == 1 and isinstance(bad, Exception)


@pytest.mark.parametrize(
    "raw, said",
    [
        (_pictures()[:2], "got list length 2: 2 images"),
        (np.zeros((2, 64, 96, 3), np.uint8), "got ndarray (2, 64, 96, 3): 2 images"),
        (np.zeros((64, 96), np.uint8), "got ndarray (64, 96)"),
        (np.zeros((0, 96, 3), np.uint8), "got ndarray (0, 96, 3)"),
        (Pillow.new("RGB", (2000, 4)), "got Image (2000, 4): absolute aspect ratio must be smaller"),
        ([], "got list length 0: need at least one array to concatenate"),
        (None, "got NoneType: only a single or a list"),
    ],
    ids=["list", "batch", "grey", "empty", "narrow", "nothing", "none"],
)
def test_what_is_not_one_image_fails_its_request_alone(dynamo: Any, checkpoint: Path, raw: Any, said: str) -> None:
    """Dynamo compares counts of a shared batch: two images of one item would end other requests."""
    good, bad = _encoded(dynamo, "FusedVisionEncoder", checkpoint, [[_pictures()[0]], [raw]], errors=True)
    assert len(good) == 1 and type(bad) is ValueError
    lead = "fusedvit: preprocess: one image expected, a URL, a Pillow image or pixels [H, W, 3], "
    assert str(bad).startswith(lead + said) and "\n" not in str(bad)


@pytest.mark.parametrize(
    "change, said",
    [({"patch_size": 14}, "patch_size 16 expected, got 14"), ({"merge_size": 1}, "merge_size 2"), (None, "no image")],
)
def test_a_processor_that_does_not_fit_is_refused_at_the_start(
    dynamo: Any, checkpoint: Path, tmp_path: Path, change: dict[str, int] | None, said: str
) -> None:
    """Its requests would be answered with errors, or with patches in another order."""
    ours, driver, _ = dynamo
    other = shutil.copytree(checkpoint, tmp_path / "other")
    settings = other / "preprocessor_config.json"
    if change is None:
        settings.unlink()
    else:
        settings.write_text(json.dumps(json.loads(settings.read_text()) | change))
    with pytest.raises(InputError, match=said):
        driver(ours.FusedVisionEncoder()).load(str(other))


@pytest.mark.parametrize("heeds", [True, False], ids=["ends", "goes on"])
def test_images_that_are_being_fetched_when_it_is_shut_down(
    dynamo: Any, monkeypatch: pytest.MonkeyPatch, heeds: bool
) -> None:
    """Whoever waits for one is told so, and who comes later; closing does not wait for a fetch without end."""
    ours, _, _ = dynamo
    monkeypatch.setattr(ours, "CLOSING", 0.2)
    loader, asked = ours._Loader(), threading.Event()

    async def endless(url: str) -> Any:
        asked.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError) if not heeds else contextlib.nullcontext():
                await asyncio.sleep(60)

    loader._images = types.SimpleNamespace(load_image=endless)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(loader.load, "http://host/a.png") for _ in range(2)]
        assert asked.wait(10)
        begin = time.monotonic()
        loader.close()
        assert time.monotonic() - begin < 5
        for each in waiting:
            with pytest.raises(RuntimeError, match="shut down before the image was there"):
                each.result(10)
    with pytest.raises(RuntimeError, match="shut down before the image was there"):
        loader.load("http://host/a.png")
    loader.close()
