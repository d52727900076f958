"""Captures launches into CUDA graphs, behind a small interface that tests can replace."""

import gc
from collections.abc import Callable

import torch


class CurrentStream:
    """The current stream of one device, returned as the same object as long as it stays current.

    PyTorch's own lookup takes at least 3 us on the host, a comparison of handles 0.2 us. PyTorch never destroys its
    streams, so a handle identifies a stream for good. The handle of an `ExternalStream` may be reused, so such streams
    are looked up each time, and each time are a new object.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._last: tuple[int, torch.cuda.Stream] | None = None

    def get(self) -> torch.cuda.Stream:
        """The current stream of the calling thread."""
        last = self._last
        if last is not None and last[0] == torch._C._cuda_getCurrentRawStream(self._index):
            return last[1]
        stream = torch.cuda.current_stream(self._device)
        handle: int = stream.cuda_stream
        if handle == 0 or handle != stream.stream_id:  # an external stream's id is its handle
            self._last = handle, stream
        return stream


class CudaCapture:
    """CUDA graphs of one device: one memory pool, one capture stream.

    The capture mode is `thread_local`, so that other threads may allocate and copy meanwhile. One event orders the
    users of the static buffers across streams; consecutive users on one stream do not wait for it. A manager calls
    every method under its lock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._used = torch.cuda.Event()
        self._current = CurrentStream(device)
        self._user: torch.cuda.Stream | None = None  # the stream on which `_used` was recorded last
        self._next = self._stream  # the stream on which it will be recorded next
        self._held = 0

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Captures the launches of `run`, which allocates nothing and reads nothing back."""
        graph = torch.cuda.CUDAGraph()
        self.wait()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        free, _ = torch.cuda.mem_get_info(self._device)
        try:
            with torch.cuda.stream(self._stream):
                self._make_room()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        except BaseException:
            graph.reset()
            raise
        self._held += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph

    def _make_room(self) -> None:
        """Leaves 16 bytes in the allocator's cache of the capture stream.

        The first `capture_begin` takes them for the random generator. If memory ran out there, PyTorch would end the
        process when the graph is destroyed.

        Raises:
            torch.cuda.OutOfMemoryError: the bytes cannot be allocated.
        """
        room = [torch.empty(1, dtype=torch.int64, device=self._device) for _ in range(2)]
        del room

    def before_use(self) -> None:
        """Makes the current stream wait until the static buffers are free; `after_use` follows on the same stream."""
        self._next = self._current.get()
        if self._next is not self._user:
            self._next.wait_event(self._used)

    def after_use(self) -> None:
        """Records on the stream of `before_use` that the static buffers are in use up to this point."""
        self._used.record(self._next)
        self._user = self._next

    def wait(self) -> None:
        """Makes the host wait until nothing uses the static buffers."""
        self._used.synchronize()

    def held_bytes(self) -> int:
        """Device memory that captured graphs hold, without the static buffers."""
        return self._held

    def forget(self) -> None:
        """Begins a new memory pool. Every graph must have been reset, which freed the old pool."""
        self._pool = torch.cuda.graph_pool_handle()
        self._held = 0

    def give_back(self) -> None:
        """Returns freed memory to the device."""
        gc.collect()
        torch.cuda.empty_cache()
