"""The `fusedvit` command: the options of each subcommand. The file of a subcommand's name does its work and is imported
when the subcommand runs, so that `--help` waits for neither torch nor transformers."""

import contextlib
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import fusedvit
from fusedvit.cli.console import (
    PICTURES,
    STDOUT,
    Outcome,
    new_console,
    progress,
    refuse_unwritable,
    write,
)
from fusedvit.cli.ending import FAILED, PASSED, UNUSABLE, missing_extra
from fusedvit.errors import InputError, failed_import, first_line, is_out_of_memory, unnamed

app = typer.Typer(
    name="fusedvit",
    help="Fused Triton kernels and CUDA graphs for the vision towers of Hugging Face models. "
    "Exit codes: 0 fine; 1 done, and something is not right (answers differ, a target is missed, an input fails); "
    "2 not done (usage, input, the machine); 3 an error that nobody foresaw; 130 Ctrl-C; 141 no reader of the output; "
    "143 SIGTERM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals would print tensors and paths
)
bench_app = typer.Typer(help="Measure towers and operations against their peers.", invoke_without_command=True)
app.add_typer(bench_app, name="bench")


def _output(given: str | Path) -> Path:
    """The path of an output. An empty one, such as from an empty shell variable, would mean the current folder."""
    if not str(given):
        raise typer.BadParameter("a path to write to expected, got ''")
    return Path(given)


Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="PATH",
        parser=lambda given: str(_output(given)),
        help="Write everything as JSON; '-' prints it, and nothing else.",
    ),
]
MediaFiles = Annotated[
    list[str] | None,
    typer.Argument(metavar="[IMAGE|VIDEO]...", help="Left out: a photograph and a video that we ship."),
]
Towers = Annotated[
    list[str] | None,
    typer.Option("--tower", metavar="NAME", help="Qwen3-VL-8B, Qwen3-VL-2B, another family's, or tiny."),
]
Fa3 = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        envvar="FUSEDVIT_FA3",
        help="FA3's library, vLLM's build (.xz too), to compare with.",
        exists=True,
    ),
]
Rows = Annotated[
    list[int] | None, typer.Option("--rows", metavar="PATCHES", min=1, help="Each operation alone, at this many rows.")
]
Without = Annotated[
    list[str] | None, typer.Option("--without", metavar="BACKEND", help="Measure without it: linear/hopper ...")
]
Commit = Annotated[str, typer.Option(help="The commit to record; else read from git.")]


def run(command: str, json: str | None, **arguments: Any) -> None:
    """Runs `fusedvit.cli.<command>`, writes its document and exits with its code. Unusable input and failures of the
    machine exit with 2 and one line. `ending` has the exit codes that all commands share."""
    alone = json == STDOUT
    try:
        if json and not alone:
            refuse_unwritable(json)
        if arguments.get("plot"):
            refuse_unwritable(arguments["plot"], PICTURES)
        with contextlib.redirect_stdout(sys.stderr) if alone else contextlib.nullcontext():
            outcome = _outcome(command, json=None if alone else json, **arguments)
        if json:
            write(outcome.document, json)
    except Exception as error:
        said = _why_unusable(error, command)
        if said is None:
            raise  # `ending` turns it into an exit code
        _refuse(said)
    raise typer.Exit(PASSED if outcome.passed else FAILED)


def _why_unusable(error: Exception, command: str) -> str | None:
    """One line that says how the input or the machine failed a command; None for an unforeseen error."""
    if isinstance(error, InputError):
        return unnamed(error)
    if isinstance(error, OSError):
        return f"{error.filename or command}: {error.strerror}" if error.errno else first_line(error)
    if is_out_of_memory(error):
        return f"out of memory: {first_line(error)}"
    return missing_extra(error) or failed_import(error)


def _refuse(said: str) -> NoReturn:
    new_console(stderr=True).out(said, style="red", highlight=False)
    raise typer.Exit(UNUSABLE) from None


def _outcome(command: str, **arguments: Any) -> Outcome:
    with progress() as step:
        step("importing torch")
        module = import_module(f"fusedvit.cli.{command}")
    return module.run(**arguments)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fusedvit {fusedvit.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    media: MediaFiles = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH_OR_ID", help="A checkpoint to take the tower from; else random weights.")
    ] = None,
    plot: Annotated[Path, typer.Option(metavar="PATH", parser=_output, help="Where the picture goes.")] = Path(
        "demo.png"
    ),
    json: Json = None,
) -> None:
    """Run the original and the fused tower on real media, side by side."""
    run("demo", json, media=media, model=model, plot=plot)


@app.command()
def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint: a folder or a hub name.")],
    media: MediaFiles = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; else the GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; else bf16 on a GPU, fp32 on a CPU.")] = None,
    json: Json = None,
) -> None:
    """Compare the fused tower of your checkpoint with the original, on your media.

    Media are resized to 4,096 to 1,048,576 pixels a frame, whatever the checkpoint's own processor does.
    """
    run("verify", json, model=model, media=media, device=device, dtype=dtype)


@app.command("compile")
def compile_kernels(
    model: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Checkpoints (folders, hub names, config.json), or towers.")
    ],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="a100, a10g, l4, l40s, h100, h200, b200, rtx-5090 ...")],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", parser=_output, help="Where to; FUSEDVIT_KERNELS names it at run time.")
    ],
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; else one per core.")] = None,
    json: Json = None,
) -> None:
    """Compile everything that towers launch on a GPU, here, where none is needed: for container images."""
    run("compile", json, model=model, gpu=gpu, out=out, dtype=dtype, jobs=jobs)


@app.command()
def env(json: Json = None) -> None:
    """Show versions and GPUs, and whether towers can run fused here."""
    run("env", json)


@app.command()
def tune(
    tower: Annotated[
        list[str] | None,
        typer.Option("--tower", metavar="NAME", help="As for bench, or 'all'; by default Qwen3-VL-8B and -2B."),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option("--budget", metavar="PATCHES", min=4, help="Row budgets; else the ladder's from 256 to 65536."),
    ] = None,
    operation: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="NAME", help="Only these, as `report()` names them: qkv, fc2 ..."),
    ] = None,
    budget_minutes: Annotated[float, typer.Option(min=0, help="Stop after so long; run again to go on.")] = 12.0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile and check candidates; else one per core.")
    ] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Every candidate, not only those that the cost model thinks best.")
    ] = False,
    new_kernels: Annotated[
        bool, typer.Option(help="Also kernels that the tower would not compile without the table.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be tried.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", parser=_output, help="The table; else your own in the cache.")
    ] = None,
    json: Json = None,
) -> None:
    """Find the fastest backend and tile of every operation on this GPU; the table is used from the next process on."""
    options: dict[str, Any] = {"tower": tower, "budget": budget, "operation": operation}
    options |= {"budget_minutes": budget_minutes, "jobs": jobs, "thorough": thorough, "new_kernels": new_kernels}
    run("tune", json, **options, dry_run=dry_run, out=out)


@app.command()
def embed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint: a folder or a hub name.")],
    given: Annotated[
        list[str],
        typer.Argument(metavar="INPUT... OUT", help="Folders, files, .txt lists, .parquet tables; the output folder."),
    ],
    output: Annotated[str, typer.Option(help="mean: a row an image; tokens: a row a merged token.")] = "mean",
    deepstack: Annotated[bool, typer.Option("--deepstack", help="Append the deepstack features to each row.")] = False,
    shard_size: Annotated[int, typer.Option(min=1, help="Inputs per shard.")] = 512,
    gpus: Annotated[str | None, typer.Option(help="'all' or numbers such as 0,1: a process on each.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; else the GPU if there is one.")] = None,
    json: Json = None,
) -> None:
    """Embed images and videos into shards on the disk; a job that was killed goes on where it was."""
    options = {"output": output, "deepstack": deepstack, "shard_size": shard_size, "gpus": gpus, "device": device}
    run("embed", json, model=model, given=given, **options)


@bench_app.callback()
def bench(
    context: typer.Context,
    tower: Towers = None,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these of the nine, no sweep; 'none' for none.")
    ] = None,
    sweep: Annotated[
        bool | None, typer.Option("--sweep/--no-sweep", help="Single images of many sizes and videos of many lengths.")
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="A minute or two: one tower by default, no sweep, fewer rounds and peers.")
    ] = False,
    compile_on: Annotated[
        list[str] | None, typer.Option("--compile", metavar="WORKLOAD", help="Run torch.compile there: minutes each.")
    ] = None,
    fa3: Fa3 = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Timing per workload, in seconds.")] = None,
    rows: Rows = None,
    without: Without = None,
    vllm: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Compare with this vLLM's own tower: docs/serving.md.", exists=True),
    ] = None,
    json: Json = None,
    commit: Commit = "",
) -> None:
    """Whole towers against Hugging Face, torch.compile and an engine-like encoder; or inside vLLM."""
    if context.invoked_subcommand is not None:
        _refuse_options_before(context, context.invoked_subcommand)
        return
    options = {"tower": tower, "workload": workload, "sweep": sweep, "short": short, "compile_on": compile_on}
    measured: dict[str, Any] = {"fa3": fa3, "seconds": seconds, "rows": rows, "without": without, "vllm": vllm}
    run("bench", json, **options, **measured, commit=commit)


def _refuse_options_before(context: typer.Context, subcommand: str) -> None:
    """Refuses options given before a subcommand of `bench`, which would never get them; the environment's are fine."""
    given = [
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
        raise typer.BadParameter(
            f"expected after `bench {subcommand}`, got before it: {', '.join(flags[name] for name in given)}"
        )


@bench_app.command()
def kernels(
    tower: Towers = None,
    fa3: Fa3 = None,
    rows: Rows = None,
    without: Without = None,
    json: Json = None,
    commit: Commit = "",
) -> None:
    """Each operation alone against cuBLAS, FA3, cuDNN and torch; weights rotated, so that none is found in L2."""
    run("bench", json, kernels=True, tower=tower, fa3=fa3, rows=rows, without=without, commit=commit)


@bench_app.command()
def pixels(
    tower: Towers = None,
    images: Annotated[int, typer.Option(min=16, help="JPEGs of the corpus.")] = 2000,
    seconds: Annotated[float | None, typer.Option(min=0, help="Timing per workload and contender, in seconds.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", parser=_output, help="Where a picture of the stages goes.")
    ] = None,
    json: Json = None,
    commit: Commit = "",
) -> None:
    """Images to tokens: Hugging Face's processor on the CPU and on the GPU against ours, JPEGs a second."""
    run("bench", json, pixels=True, tower=tower, images=images, seconds=seconds, plot=plot, commit=commit)
