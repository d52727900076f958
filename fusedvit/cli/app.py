"""The `fusedvit` command."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fusedvit.cli import bench, demo_report, documents, environment, picture, tune, verify
from fusedvit.cli import demo as demo_command
from fusedvit.cli.on_media import on_media

app = typer.Typer(
    name="fusedvit",
    help="Fused Triton kernels and CUDA graphs for the vision towers of Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals would print tensors and paths
)

app.add_typer(bench.app, name="bench")
app.command("tune")(tune.command)
app.command("verify")(verify.command)

Json = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write everything to a JSON file as well.")]


@app.command()
def demo(
    media: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[IMAGE|VIDEO]...", help="Left out: a photograph and a video that we ship."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH_OR_ID", help="A checkpoint to take the tower from; else random weights.")
    ] = None,
    plot: Annotated[Path, typer.Option(metavar="PATH", help="Where the picture goes.")] = Path("demo.png"),
    json: Json = None,
) -> None:
    """Run the original and the fused tower on real media, side by side. Exits with 1 where they differ."""
    console = Console()
    files, found = on_media(media, lambda files, step: (files, demo_command.run(files, model, step)))
    picture.draw(found, files, plot)
    if json:
        documents.write({**documents.plain(found), "passed": found.passed}, json)
    demo_report.show(found, console)
    console.print(f"picture: {escape(str(plot))}" + (f", document: {escape(str(json))}" if json else ""))
    raise typer.Exit(0 if found.passed else 1)


@app.command()
def env(json: Json = None) -> None:
    """Show the versions and GPUs that fusedvit sees."""
    found = environment.collect()
    environment.show(found, Console())
    if json:
        documents.write(found, json)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
