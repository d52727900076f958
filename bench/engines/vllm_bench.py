"""`fusedvit bench --vllm FOLDER`: vLLM's tower as it serves, and the same model with the plugin.

Contenders run the model runner's batches, one per modality, through `embed_multimodal` or vLLM's graph manager,
interleaved. "fused tower" calls the handle, "vLLM's module" the tower through the plugin, "ours" the model. A contender
whose answer breaks the tolerance rule gets no time, unless the answer has NaN: then its time is printed and marked.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fusedvit.api import fuse
from fusedvit.bench.engines import vllm_models
from fusedvit.bench.engines.vllm_models import Batch, Served, batches_of, hugging_face, in_grid_order, new_manager
from fusedvit.bench.tables import VLLM_PEERS, vllm_table
from fusedvit.bench.timing import Contender, interleaved_bursts, ratios, spread
from fusedvit.bench.towers import pixels_for, verdict_of
from fusedvit.bench.workloads import Grid, tokens
from fusedvit.errors import named_line
from fusedvit.outputs.hugging_face import side_by_side

EAGER, GRAPHS, EXACT, REPLAY = VLLM_PEERS
OURS, MODULE, DIRECT = "ours", "vLLM's module", "fused tower"
Step = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        folder: the folder with vLLM; see `vllm_models.open_site`.
        seconds: seconds of timing for each workload.
    """

    folder: Path
    tower: str
    workloads: Mapping[str, Grid]
    seconds: float
    dtype: torch.dtype = torch.bfloat16


def measure(
    options: Options,
    device: torch.device,
    step: Step = lambda text: None,
    keep: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The document without its passport; `keep` is called with it after every workload.

    Raises:
        InputError: the folder holds no vLLM, or the tower is of another family.
        UnsupportedModel: the plugin did not fuse vLLM's tower; its log line says why.
    """
    step("vLLM: models and graphs")
    vllm_models.open_site(options.folder)
    from vllm.config import set_current_vllm_config

    served = vllm_models.serve(options.tower, device, options.dtype)
    document: dict[str, Any] = {"tower": options.tower, "vllm": about(served), "workloads": {}}
    with set_current_vllm_config(served.config), torch.inference_mode():
        with torch.inference_mode(False):
            fuse(served.ours).warmup(calls=[torch.tensor(grid) for grid in options.workloads.values()])
        manager = new_manager(served) if device.type == "cuda" else None
        if manager is not None:
            document["vllm"] |= {"budgets": manager.token_budgets, "max_items": manager.max_batch_size}
        for name, grid in options.workloads.items():
            step(name)
            try:
                document["workloads"][name] = row(served, manager, grid, options)
            except RuntimeError as error:  # the other workloads' figures are worth having
                document.setdefault("failed", {})[name] = named_line(error)
            document["report"] = fuse(served.ours).report()
            keep(document)
    return document


def about(served: Served) -> dict[str, Any]:
    """Versions, the device, and the attention that vLLM runs."""
    import transformers
    import vllm

    attention = served.theirs.visual.blocks[0].attn.attn
    return {
        "version": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if served.device.type == "cuda" else "cpu",
        "attention": str(served.theirs.visual.attn_backend),
        "fa_version": getattr(attention, "_fa_version", None),
    }


def row(served: Served, manager: Any, grid: Grid, options: Options) -> dict[str, Any]:
    """One workload: parity, errors, times, ratios."""
    pixels = pixels_for(served.tower, grid, tokens(grid))
    batches = batches_of(grid, pixels)
    exact = [] if manager is None else [_exact(served, batch) for batch in batches]
    runs = _runs(served, manager, exact, batches)
    answers = {name: _answer(name, run, grid) for name, run in runs.items() if name != REPLAY}
    wanted = hugging_face(served, pixels, grid)
    gates = {name: _gate(answer, *wanted) for name, answer in answers.items()}
    del wanted, answers
    timed = [Contender(n, run) for n, run in runs.items() if n == REPLAY or gates[n]["passed"] or gates[n]["nan"]]
    bursts = {name: burst.ms for name, burst in interleaved_bursts(timed, served.device, options.seconds).items()}
    for one in exact:
        one.clear()
    found: dict[str, Any] = {
        "grid": grid,
        "tokens": tokens(grid),
        "parity": gates,
        "ms": {name: asdict(spread(ms)) for name, ms in bursts.items()},
    }
    if OURS in bursts:
        found["ratio"] = {name: asdict(ratios(ms, bursts[OURS])) for name, ms in bursts.items() if name != OURS}
    for name, outer, inner in (("adapter_ms", MODULE, DIRECT), ("embed_multimodal_ms", OURS, MODULE)):
        if outer in bursts and inner in bursts:
            found[name] = asdict(spread([a - b for a, b in zip(bursts[outer], bursts[inner], strict=True)]))
    return found


def _exact(served: Served, batch: Batch) -> Any:
    """A graph manager with one graph, exactly as large as `batch`."""
    rows = next(value for name, value in batch.items() if name.endswith("grid_thw")).tolist()
    merged = sum(t * h * w for t, h, w in rows) // served.theirs.visual.spatial_merge_size**2
    return new_manager(served, (merged,), len(rows), sum(t for t, _, _ in rows))


def _runs(served: Served, manager: Any, exact: list[Any], batches: list[Batch]) -> dict[str, Callable[[], Any]]:
    handle, visual = fuse(served.ours), served.ours.visual

    def direct() -> list[Any]:
        found = []
        for batch in batches:
            pixels, grid = batch.values()
            answer = handle.answer(visual, pixels, grid, {})
            assert answer is not None, handle.report()
            found.append(side_by_side(answer.outputs, handle.spec))
        return found

    def module() -> list[Any]:
        return [visual(pixels, grid_thw=grid) for pixels, grid in map(dict.values, batches)]

    runs: dict[str, Callable[[], Any]] = {EAGER: lambda: [served.theirs.embed_multimodal(**b) for b in batches]}
    if manager is not None:
        graphs = [g.graph for m in exact for found in m.budget_graphs.values() for g in found.values()]
        runs[GRAPHS] = lambda: [manager.execute(b) for b in batches]
        runs[EXACT] = lambda: [m.execute(b) for m, b in zip(exact, batches, strict=True)]
        runs[REPLAY] = lambda: [graph.replay() for graph in graphs]
    runs[OURS] = lambda: [served.ours.embed_multimodal(**b) for b in batches]
    return runs | {MODULE: module, DIRECT: direct}


def _answer(name: str, run: Callable[[], Any], grid: Grid) -> torch.Tensor:
    outputs = run()
    if name in (MODULE, DIRECT):  # these return whole batches: first the images', then the videos'
        merge = sum(t * h * w for t, h, w in grid) // sum(len(rows) for rows in outputs)
        images = [(t, h, w) for t, h, w in grid if t == 1]
        videos = [(t, h, w) for t, h, w in grid if t > 1]
        sizes = [[t * h * w // merge for t, h, w in part] for part in (images, videos) if part]
        outputs = [rows.split(size) for rows, size in zip(outputs, sizes, strict=True)]
    return in_grid_order(grid, outputs).clone()


def _gate(answer: torch.Tensor, ref: list[torch.Tensor], pt: list[torch.Tensor]) -> dict[str, Any]:
    rms = (answer.double() - ref[0].double()).pow(2).mean().sqrt().item()
    nan = int((~torch.isfinite(answer)).sum())
    return verdict_of([answer], ref, pt) | {"rms_error": rms, "nan": nan}


def show(document: dict[str, Any], console: Any) -> None:
    """Prints a table on a rich console, and the failed workloads."""
    about = document["vllm"]
    title = f"{document['tower']} inside vLLM {about['version']} on {about['device']}"
    vllm_table(document["workloads"]).show(title, console)
    for name, reason in document.get("failed", {}).items():
        console.print(f"{name}: {reason}", style="red", markup=False)


def any_wrong(document: dict[str, Any]) -> bool:
    """Whether one of our answers is wrong, or a workload failed; vLLM's wrong answers do not count."""
    rows = document["workloads"].values()
    ours = [found["parity"][name]["passed"] for found in rows for name in (OURS, MODULE, DIRECT)]
    return bool(document.get("failed")) or not ours or not all(ours)
