"""Two ranks with sharded weights, vLLM's default under tensor parallelism: `python sharded.py SCENARIO...`, in turn."""

import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import multiprocessing
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.tensorizer import meta_tensor_mode
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

import fusedvit
from fusedvit.bench.towers import random_weights_
from fusedvit.checks.as_built import Built
from fusedvit.runtime.item_shares import in_order, shares_of
from fusedvit.serving import vllm_worker
from fusedvit.serving.served import SERVED
from fusedvit.serving.sharded import ShardedTower
from tests.serving.vllm import support

PATIENCE, LATE = 4.0, 9.0


def load(rank: int, architecture: str = "Qwen3VLForConditionalGeneration") -> tuple[Any, Any]:
    """(config, model); every rank's loader takes its shards of the same random weights."""
    config = support.config_of(architecture, tensor_parallel_size=2)
    config, model = support.load(config=config, rank_and_world=(rank, 2))
    fill(model, 1.0)
    return config, model


def fill(model: Any, scale: float) -> None:
    served = vars(model.visual).get(SERVED)
    if served is None:
        return
    source = served.sharded.whole
    random_weights_(source)
    state = {name: value.detach().clone() * scale for name, value in source.named_parameters()}
    assert model.visual.load_weights(state.items())
    for parameter in source.parameters():
        parameter.data.fill_(torch.nan)  # what is gathered comes from shards


def own(config: Any, model: Any, grid: Any, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """vLLM's own sharded answer."""
    tower = model.visual
    cls, tower.__class__ = type(tower), type(tower).__mro__[1]
    try:
        return support.embed(config, model, grid, dtype)
    finally:
        tower.__class__ = cls


def check(config: Any, model: Any) -> None:
    before = stats(model)["fused"]
    for grid in support.GRIDS.values():
        for dtype in (torch.uint8, torch.float32):
            got, want = support.embed(config, model, grid, dtype), own(config, model, grid, dtype)
            assert want.norm() > 0 and (got - want).norm() <= 1e-5 * want.norm(), (got - want).norm() / want.norm()
    assert stats(model)["fused"] - before >= 2 * (len(support.GRIDS) + 1), "mixed: two calls"


def stats(model: Any) -> dict[str, Any]:
    return vars(model.visual)[SERVED].handle.stats()


def parity(rank: int) -> None:
    """Answers, also after weights changed, and that rows are one GPU's on the same shares."""
    for architecture in support.MODELS:
        if "Moe" in architecture or "Gemma" in architecture:
            continue  # the same towers, and one whose weights are whole on every rank
        config, model = load(rank, architecture)
        assert not config.compilation_config.cudagraph_mm_encoder
        names = [name for name, _ in model.named_parameters()]
        check(config, model)
        assert names == [name for name, _ in model.named_parameters()], "the model has no more parameters than before"
        fill(model, 0.9)
        check(config, model)
        with torch.no_grad():
            for parameter in model.visual.parameters():
                parameter.data.mul_(1.1)  # on every rank
        check(config, model)
    sharded, grid = vars(model.visual)[SERVED].sharded, torch.tensor(support.GRIDS["mixed"])
    pixels = support.pixels_of(model, support.GRIDS["mixed"], torch.float32)
    with torch.inference_mode(), support.under(config):
        shares = shares_of(sharded.handle.spec, len(pixels), grid, 2)
        alone = [sharded.encode(sharded.handle, sharded.whole, s.pixels_of(pixels), s.grid) for s in shares]
        assert torch.equal(model.visual(pixels, grid), in_order(shares, alone))


def lines() -> list[str]:
    """What the plugin says from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.fusedvit").addHandler(handler)
    return said


def raised(run: Callable[[], Any]) -> str:
    begin = time.monotonic()
    try:
        run()
    except RuntimeError as error:
        assert time.monotonic() - begin < 60
        return str(error)
    raise AssertionError("nothing was raised")


def differences(rank: int) -> None:
    """What keeps one rank from running fused keeps both, what one has written to both gather again, and what one alone
    fails at raises on both; afterwards all is well."""
    config, model = load(rank)
    grid = support.GRIDS["mixed"]
    check(config, model)
    block = model.visual.blocks[1]
    want, seen = support.embed(config, model, grid), list[int]()
    if rank == 1:
        hook = block.mlp.register_forward_hook(lambda *_: seen.append(1))
    got = support.embed(config, model, grid)
    assert (got - want).norm() <= 1e-5 * want.norm() and bool(seen) is (rank == 1)
    assert stats(model)["details"]["hooks"] == "on rank 1: on blocks.1.mlp"
    if rank == 1:
        hook.remove()
    check(config, model)

    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: None) if rank == 1 else None
    got = support.embed(config, model, grid)
    assert (got - want).norm() <= 1e-5 * want.norm()
    named = "on rank 1: on every module, in torch.nn.modules.module._global_forward_hooks"
    assert stats(model)["details"]["hooks"] == named
    if everywhere is not None:
        everywhere.remove()
    check(config, model)

    sharded: ShardedTower = vars(model.visual)[SERVED].sharded
    encode = sharded.encode

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    if rank == 0:
        sharded.encode = fails
    error = raised(lambda: support.embed(config, model, grid))
    assert "out of memory" in error and (rank == 0 or "rank 0 failed OutOfMemoryError" in error), error
    sharded.encode = encode
    check(config, model)

    if rank == 1:
        block.attn.qkv.weight.data.mul_(2)  # this rank's heads
    check(config, model)
    if rank == 1:
        sharded.stale = "loaded on one rank only"
    check(config, model)

    seen.clear()
    hook = block.mlp.register_forward_hook(lambda *_: seen.append(1))
    assert support.embed(config, model, grid).norm() > 0 and seen, "on every rank: vLLM's own code"
    hook.remove()
    check(config, model)


def asked(rank: int) -> None:
    """What a handle counts, and what it is told: as for a tower that is not sharded.

    The last scenario of a process: casting a tower rounds the rotary table, which vLLM's towers share.
    """
    config, model = load(rank)
    tower, grid, handle = model.visual, support.GRIDS["images"], fusedvit.fuse(model)
    if rank == 1:  # from before the first call
        hook = tower.blocks[1].mlp.register_forward_hook(lambda *_: None)
    for _ in range(3):
        assert support.embed(config, model, grid).norm() > 0
    found = stats(model)
    assert (found["calls"], found["fused"], found["original"]) == (3, 0, {"hooks": 3}), found
    assert handle.tower is tower and (handle.reason() is None) is (rank == 0)
    handle.reconfigure(fusedvit.FuseConfig(strict=rank == 0, watch_data=False))
    assert "hooks: on rank 1" in raised(lambda: support.embed(config, model, grid)), "one rank is strict: both raise"
    if rank == 1:
        hook.remove()
    check(config, model)

    def off_by(want: torch.Tensor) -> float:
        return float((support.embed(config, model, grid) - want).norm() / want.norm())

    for tell in (handle.refresh, handle.release, lambda: rank or handle.refresh()):
        for parameter in tower.parameters():
            parameter.data.mul_(1.1)
        assert off_by(own(config, model, grid)) > 1e-3, "not watched"
        tell()
        assert off_by(own(config, model, grid)) <= 1e-5
    for dtype in (torch.bfloat16, torch.float32):
        tower.to(dtype)
        before, want = stats(model)["fused"], own(config, model, grid)
        assert off_by(want) <= 0.1 and support.embed(config, model, grid).dtype == want.dtype == dtype
        assert stats(model)["fused"] == before + 2
    with torch.inference_mode(), support.under(config):
        pixels = support.pixels_of(model, grid, torch.float32)
        assert torch.equal(handle.concatenated(pixels, torch.tensor(grid)), tower(pixels, torch.tensor(grid)))


def judged(rank: int) -> None:
    """Grids that the fused encoder refuses: every rank runs vLLM's code. Arrays run fused; bytes are normalised as the
    tower's buffers say, whichever way they came to hold it."""
    config, model = load(rank)
    check(config, model)
    tower, grid = model.visual, support.GRIDS["mixed"]
    pixels = support.pixels_of(model, grid, torch.float32)

    def answers(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode(), support.under(config):
            return tower(pixels, given), type(tower).__mro__[1].forward(tower, pixels, given)

    before = stats(model)
    got, want = answers(torch.tensor([*grid, (1, 0, 4)]))
    assert torch.equal(got, want) and stats(model)["original"] == {"engine": 1}
    assert stats(model)["fused"] == before["fused"] and stats(model)["calls"] == before["calls"] + 1
    got, want = answers([torch.tensor(row) for row in grid])
    assert (got - want).norm() <= 1e-5 * want.norm() and stats(model)["fused"] > before["fused"]
    try:
        answers(torch.tensor(grid, dtype=torch.float32))
    except TypeError:  # vLLM's own, on every rank
        assert stats(model)["original"] == {"engine": 2}
    else:
        raise AssertionError("vLLM takes floats")

    norm = tower.input_norm
    for write in (lambda: norm.bias.data.mul_(2), lambda: setattr(norm, "bias", norm.bias * 2)):
        write()
        check(config, model)


def delay(rank: int) -> None:
    """A rank that comes too late, to its first call or another: both raise."""
    config, model = load(rank)
    sharded = vars(model.visual)[SERVED].sharded
    sharded.patience = PATIENCE
    if "FIRST_CALL" not in os.environ:
        check(config, model)
        time.sleep(1.0 * rank)
        check(config, model)
    if rank == 1:
        time.sleep(LATE)
    error = raised(lambda: support.embed(config, model, support.GRIDS["mixed"]))
    assert f"rank {rank} waited for the other 1" in error, error
    time.sleep(LATE * (1 - rank))  # its process is there still


def start(rank: int) -> None:
    """A start without a memory profile gathers and prepares on every rank, and the first call does neither."""
    config, model = load(rank)
    served, worker = vars(model.visual)[SERVED], worker_of(model)
    for _ in range(2):
        vllm_worker._initialize(lambda _: None, worker)
        assert served.ready and not served.sharded.stale and stats(model)["refreshes"] == 1
    support.embed(config, model, support.GRIDS["images"])
    assert stats(model)["refreshes"] == 1
    check(config, model)


def sleep(rank: int) -> None:
    """Shards are gathered as weights are loaded, woken and reloaded: by hooks that every rank passes, before a call."""
    config, model = load(rank)
    worker = worker_of(model)
    served, shards = vars(model.visual)[SERVED], list(model.visual.parameters())
    vllm_worker._profile(lambda runner: None, worker.model_runner)
    assert served.ready and not served.sharded.stale
    check(config, model)
    for level in (1, 2):
        content = [p.detach().clone() for p in shards]
        vllm_worker._sleep(lambda self, level=1: None, worker, level=level)
        assert not served.ready and not stats(model)["weights_mib"]
        if level == 2:  # the content is lost
            for parameter in shards:
                parameter.data.zero_()
        vllm_worker._wake_up(lambda self, tags=None: None, worker, tags=["weights"])
        assert served.ready is (level == 1)
        if level == 2:
            for parameter, value in zip(shards, content, strict=True):
                parameter.data.copy_(value * 0.9)
            vllm_worker._reload(lambda self: None, worker)
        assert served.ready and not served.sharded.stale
        check(config, model)


def replicated(rank: int) -> None:
    """Gemma 4's weights are whole on every rank, where each runs fused by itself: no rank waits for another."""
    architecture = "Gemma4ForConditionalGeneration"
    config = support.config_of(architecture, tensor_parallel_size=2)
    config, model = support.load(architecture, config, (rank, 2))
    handle, grid = vars(model.vision_tower)[SERVED].handle, support.GRIDS["mixed"]
    if rank == 1:  # one rank alone falls back
        hook = model.vision_tower.encoder.layers[0].mlp.register_forward_hook(lambda *_: None)
        original = support.embed(config, model, grid)
        hook.remove()
    got = support.embed(config, model, grid)
    assert handle.stats()["fused"] == 2, handle.report()
    assert got.norm() > 0 and (rank == 0 or (got - original).norm() <= 1e-5 * got.norm())


def forbidden(rank: int) -> None:
    config, model = load(rank)
    assert config.compilation_config.cudagraph_mm_encoder and SERVED not in vars(model.visual)
    assert torch.isfinite(support.embed(config, model, support.GRIDS["mixed"])).all()


def forbidden_here(rank: int) -> None:
    """One rank alone has other options: both run vLLM's own code, and keep its graphs."""
    if rank == 1:
        os.environ["FUSEDVIT_CONFIG"] = '{"gather_sharded": false}'
    said = lines()
    forbidden(rank)
    os.environ.pop("FUSEDVIT_CONFIG", None)
    assert rank == 1 or "rank 1: its weights are sharded" in said[0], said


def fails_on_one(rank: int) -> None:
    """A reload that fails on one rank: both raise, and the next one is a good one."""
    config, model = load(rank)
    worker = worker_of(model)
    vllm_worker._profile(lambda runner: None, worker.model_runner)
    vllm_worker._sleep(lambda self, level=1: None, worker, level=2)
    content = [p.detach().clone() for p in model.visual.parameters()]
    for parameter in model.visual.parameters():
        parameter.data.zero_()
    vllm_worker._wake_up(lambda self, tags=None: None, worker)

    def reload(worker: Any, fails: bool) -> None:
        if fails:
            raise RuntimeError("no such file")
        for parameter, value in zip(model.visual.parameters(), content, strict=True):
            parameter.data.copy_(value * 0.9)

    error = raised(lambda: vllm_worker._reload(reload, worker, rank == 1))
    assert error == "no such file" or "rank 1 failed RuntimeError: no such file" in error, error
    vllm_worker._reload(reload, worker, False)
    assert vars(model.visual)[SERVED].ready
    check(config, model)


def part_fails_on_one(rank: int) -> None:
    """A part of an update that fails on one rank waits for nobody: ranks gather at the next call."""
    config, model = load(rank)
    worker = worker_of(model)
    check(config, model)

    def receive(worker: Any) -> None:
        if rank == 1:
            raise RuntimeError("no such file")

    begin = time.monotonic()
    try:
        vllm_worker._update(receive, worker)
    except RuntimeError as error:
        assert rank == 1 and str(error) == "no such file", error
    assert time.monotonic() - begin < PATIENCE, "the engine answers before anybody calls the tower again"
    time.sleep(PATIENCE * (1 - rank))
    check(config, model)


def without_weights(rank: int) -> None:
    """Load formats that build the model on no device, or under a dispatch mode: the whole copy has memory."""
    config, plain = load(rank)
    for modes in (torch.device("meta"), meta_tensor_mode()):
        config.compilation_config.static_forward_context.clear()
        with support.under(config):
            support.start(rank, 2)
        with set_default_torch_dtype(torch.float32), modes:
            model = initialize_model(vllm_config=config, model_config=config.model_config)
        assert {p.device.type for p in vars(model.visual)[SERVED].sharded.whole.parameters()} == {"cpu"}
        shards = dict(plain.visual.named_parameters())
        for name, module in model.visual.named_modules():
            for leaf, old in [*module._parameters.items()]:
                if old is not None:
                    new = torch.nn.Parameter(shards[f"{name}.{leaf}" if name else leaf].detach(), requires_grad=False)
                    module._parameters[leaf] = new
            for leaf, old in [*module._buffers.items()]:
                if old is not None:
                    module._buffers[leaf] = plain.visual.get_submodule(name)._buffers[leaf]
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        check(config, model.eval())


def in_half(rank: int) -> None:
    """What fp16 cannot hold is judged of gathered weights, not of what a copy holds as it is built."""
    create = UnquantizedLinearMethod.create_weights

    def in_used_memory(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        create(self, layer, *args, **kwargs)
        layer.weight.data.view(torch.int16).random_(0, 300)

    config = support.config_of("Qwen3VLForConditionalGeneration", tensor_parallel_size=2, dtype="float16")
    for fits in (True, False):
        config.compilation_config.cudagraph_mm_encoder = True
        with patch.object(UnquantizedLinearMethod, "create_weights", in_used_memory):
            model = support.build(config, (rank, 2)).eval()
        random_weights_(model.visual)
        if not fits and rank == 1:  # this rank's heads
            model.visual.blocks[1].norm1.weight.data[5] = 3e3
            model.visual.blocks[1].attn.qkv.weight.data[:, 5] = 30.0
        vllm_worker._init_model_state(lambda *_: None, config, model)
        assert config.compilation_config.cudagraph_mm_encoder is not fits
        assert (SERVED in vars(model.visual)) is fits, vllm_worker.stats(worker_of(model))
    assert "beyond fp16" in vllm_worker.stats(worker_of(model))["visual"]["state"]


def worker_of(model: Any) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(model=model))


def refused_on_one(rank: int) -> None:
    """What keeps one rank from running fused once there are weights keeps both, and a strict rank makes both raise."""
    config = support.config_of("Qwen3VLForConditionalGeneration", tensor_parallel_size=2)
    for strict in (False, True):
        config.compilation_config.cudagraph_mm_encoder = True
        if strict and rank == 0:
            os.environ["FUSEDVIT_CONFIG"] = '{"strict": true}'
        model = support.build(config, (rank, 2)).eval()
        random_weights_(model.visual)
        if rank == 1:
            model.visual.blocks[1].register_forward_hook(lambda *_: None)
        if strict:
            error = raised(functools.partial(vllm_worker._judge_loaded, model))
            assert "cannot run fused: rank 1: hooks: on blocks.1" in error, error
        else:
            vllm_worker._profile(lambda _: None, worker_of(model).model_runner)
            assert "rank 1: hooks: on blocks.1" in vllm_worker.stats(worker_of(model))["visual"]["state"]
            assert config.compilation_config.cudagraph_mm_encoder and SERVED not in vars(model.visual)
            assert torch.isfinite(support.embed(config, model, support.GRIDS["mixed"])).all()
        os.environ.pop("FUSEDVIT_CONFIG", None)


def strict_where_forbidden(rank: int) -> None:
    """One rank is strict, the other may not gather: both raise as towers are built."""
    os.environ["FUSEDVIT_CONFIG"] = '{"gather_sharded": false}' if rank else '{"strict": true}'
    config = support.config_of("Qwen3VLForConditionalGeneration", tensor_parallel_size=2)
    error = raised(lambda: support.build(config, (rank, 2)))
    os.environ.pop("FUSEDVIT_CONFIG")
    assert "cannot run fused: rank 1: its weights are sharded" in error, error


def not_noted(rank: int) -> None:
    """A tower that cannot be noted as built, with a class that is not vLLM's: both ranks run vLLM's own code."""
    said = lines()
    with patch.object(Built, "of", side_effect=ValueError("merger.norm is of class elsewhere.Norm")):
        forbidden(rank)
    assert rank == 1 or "merger.norm is of class elsewhere.Norm" in said[0], said


def not_noted_on_one(rank: int) -> None:
    """Somebody has replaced a constructor on one rank alone: the other one does not wait for it in vain."""
    said, theirs = lines(), MMEncoderAttention.__init__

    def other(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)

    with patch.object(MMEncoderAttention, "__init__", other if rank == 1 else theirs):
        forbidden(rank)
    assert rank == 1 or "rank 1: " in said[0] and "MMEncoderAttention.__init__ is" in said[0], said


def rank_of(rank: int, port: int, scenarios: list[str]) -> None:
    logging.getLogger("vllm").setLevel(logging.INFO)
    with support.under(support.config_of("Qwen3VLForConditionalGeneration", tensor_parallel_size=2)):
        support.start(rank, 2, port)
    for scenario in scenarios:
        globals()[scenario](rank)
        print(f"\nrank {rank}: {scenario} holds", flush=True)
    os._exit(0)  # groups may be broken, as they are to be


if __name__ == "__main__":
    multiprocessing.spawn(rank_of, (support.free_port(), sys.argv[1:]), nprocs=2)
