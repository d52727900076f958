"""NVIDIA Dynamo's encoder backend: `--custom-encoder-class fusedvit.serving.dynamo.FusedVisionEncoder`.

Dynamo calls `preprocess` on a pool of threads, batches by merged tokens across requests, and calls `forward_batch` on
one thread; the language model runs in stock vLLM, which takes the embeddings. Importing this module needs Dynamo.
Images only, as in Dynamo.
"""

import asyncio
import contextlib
import threading
from collections.abc import Sized
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import torch
from dynamo.vllm.multimodal_utils.custom_encoder.adapter.qwen3_vl import Qwen3VLImageEncoding
from dynamo.vllm.multimodal_utils.custom_encoder.backend.base import Preprocessed, VisionEncoderBackend

from fusedvit.api import fuse
from fusedvit.checkpoint import default_dtype, device_or_default, load_tower
from fusedvit.config import FuseConfig
from fusedvit.cores import available_cores
from fusedvit.corpus.loading import image_processor_of
from fusedvit.errors import first_line, is_out_of_memory
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.pixels.processors import check_fits
from fusedvit.runtime.captured_encoder import LARGEST_BUDGET
from fusedvit.serving.embeddings import VisionEmbeddings

CLOSING = 5.0  # seconds to wait for cancelled fetches to end, and again for the loop
_SHUT_DOWN = "fusedvit: the encoder was shut down before the image was there"
MAX_THREADS = 8  # threads that decode and resize; one more runs the tower


@dataclass(frozen=True)
class Image:
    """A preprocessed image: `pixels` `[patches, width]` on the CPU, `grid_thw` `[1, 3]`."""

    pixels: torch.Tensor
    grid_thw: torch.Tensor


class FusedVisionEncoder(VisionEncoderBackend):
    """Images to embeddings for Qwen3-VL and Qwen3.5 decoders, whose adapter takes `Qwen3VLImageEncoding`.

    The tower is a checkpoint's, in bf16 on a GPU and in fp32 on a CPU.
    """

    max_batch_cost = LARGEST_BUDGET  # merged tokens
    buckets = None  # the tower has graphs of its own
    preprocess_concurrency = min(MAX_THREADS, available_cores())

    def build(self, model_id: str) -> None:
        """Loads the checkpoint's tower and image processor, fuses them, and captures every graph.

        Raises:
            InputError, UnsupportedModel: the checkpoint does not load, has no tower that can be fused, or has no image
                processor that cuts the tower's patches.
        """
        self._processor = image_processor_of(model_id)
        self._device = device_or_default(None)
        self._model = load_tower(model_id, self._device, default_dtype(self._device))
        self._handle: FusedEncoder = fuse(self._model, FuseConfig(compile="now"))
        self._merge = self._handle.spec.merge_size
        check_fits(self._processor, self._handle.spec)
        self._loader = _Loader()
        self._handle.warmup()

    def preprocess(self, raw: Any) -> Preprocessed:
        """Patches of one image, at a cost of its merged tokens. Runs on several threads at once.

        Args:
            raw: a URL (`http:`, `https:` or `data:`, fetched by Dynamo's own loader under its policy), or what Hugging
                Face's image processor takes: a PIL image, an array.

        Raises:
            ValueError: the image does not decode, the processor refuses it, or there are several images.
            RuntimeError: the encoder was shut down before the image arrived.
            Exception: any error that Dynamo's loader raises for a URL.
        """
        image = self._loader.load(raw) if isinstance(raw, str) else raw
        try:
            found = self._processor(images=[image], return_tensors="pt", device="cpu")
        except Exception as error:  # processors raise anything for values that are no image, even ZeroDivisionError
            if is_out_of_memory(error):
                raise
            raise _no_image(image, "" if hasattr(image, "shape") else first_line(error)) from error  # prints an array
        item = Image(found["pixel_values"], found["image_grid_thw"])
        if len(item.grid_thw) != 1:  # else Dynamo refuses the whole batch, images of other requests included
            raise _no_image(image, f"{len(item.grid_thw)} images")
        return Preprocessed(item, int(item.grid_thw.prod()) // self._merge**2)

    def forward_batch(self, items: list[Image], target_bucket: int | None = None) -> list[Any]:
        """One artifact per image, on the CPU, in the order of `items`."""
        if not items:
            return []
        grid = torch.cat([item.grid_thw for item in items])
        pixels = torch.cat([item.pixels for item in items])
        if self._device.type == "cuda":
            pixels = pixels.pin_memory()
        with torch.inference_mode():
            rows = self._rows(pixels.to(self._device, non_blocking=True), grid)
        levels = 0 if rows.shape[1] == self._handle.spec.out_size else len(self._handle.spec.deepstack)
        embeddings = VisionEmbeddings(rows.cpu(), grid, self._merge, levels)  # the copy waits for the tower
        return [self._artifact(item) for item in embeddings.items()]

    def close(self) -> None:
        """Gives back the tower's graphs and prepared weights."""
        self._handle.release()
        self._loader.close()

    def _rows(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return self._handle.concatenated(pixels, grid)

    def _artifact(self, image: VisionEmbeddings) -> Any:
        t, h, w = (int(n) for n in image.grid_thw[0])
        return Qwen3VLImageEncoding(image.rows, (t, h, w))


class FusedLinearEncoder(FusedVisionEncoder):
    """Images to `[tokens, out]`, without deepstack features: for text decoders, whose adapter takes plain tensors."""

    def _rows(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return super()._rows(pixels, grid)[:, : self._handle.spec.out_size]

    def _artifact(self, image: VisionEmbeddings) -> torch.Tensor:
        return image.rows.contiguous()


def _no_image(got: Any, why: str) -> ValueError:
    """The error for `got`, described by its shape, its size or its length."""
    size = tuple(got.shape) if hasattr(got, "shape") else getattr(got, "size", None)
    if size is None and isinstance(got, Sized):
        size = f"length {len(got)}"
    said = " ".join(map(str, filter(None, (type(got).__name__, size))))
    expected = "one image expected, a URL, a Pillow image or pixels [H, W, 3]"
    return ValueError(f"fusedvit: preprocess: {expected}, got {said}{why and f': {why}'}")


class _Loader:
    """Dynamo's image loader, on an event loop of its own: preprocessing runs on threads that have none.

    Once the loader is closed, threads that wait or ask for an image get an error: else they would wait forever.
    """

    def __init__(self) -> None:
        from dynamo.common.multimodal.image_loader import ImageLoader

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fusedvit-images", daemon=True)
        self._thread.start()
        self._images = ImageLoader()
        self._lock, self._closed = threading.Lock(), False
        self._pending = set[Future[Any]]()

    def load(self, url: str) -> Any:
        """A PIL image.

        Raises:
            RuntimeError: the loader is closed.
            Exception: any error of Dynamo's loader, with its HTTP status.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(_SHUT_DOWN)
            found: Future[Any] = asyncio.run_coroutine_threadsafe(self._images.load_image(url), self._loop)
            self._pending.add(found)
        try:
            return found.result()
        except CancelledError:
            raise RuntimeError(_SHUT_DOWN) from None
        finally:
            with self._lock:
                self._pending.discard(found)

    def close(self) -> None:
        """Cancels running fetches and ends the loop; waits `CLOSING` seconds at most for each."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = [*self._pending]
        for each in pending:
            each.cancel()  # its thread goes on at once
        with contextlib.suppress(TimeoutError):  # a fetch that does not end
            asyncio.run_coroutine_threadsafe(_others_ended(), self._loop).result(CLOSING)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING)
        if not self._loop.is_running():
            self._loop.close()


async def _others_ended() -> None:
    """Cancels every other task of the loop, and waits until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
