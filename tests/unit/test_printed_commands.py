"""Every command that the pages and the documents of results print is one that its program's parser takes.

Nothing runs: a program stops at what its parser made of the words.
"""

import argparse
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from fusedvit.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENGINES = {  # they import an engine
    "fusedvit.bench.engines.sglang_bench"
}
FILES = {"photo.jpg", "_vllm_fa3_C.abi3.so.xz", "FOLDER", "vllm"}  # which a reader has


def printed() -> Iterator[tuple[str, str]]:
    """(where, command) of all that stand in code, whole lines of shell or between backquotes, and in passports."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"```(?:sh|dockerfile)\n(.*?)```", text, re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        for line in lines + re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            found = re.match(r"(?:RUN |\$ )?((?:python -m (?:fusedvit|tests)|fusedvit )[^#|]*)", line)
            if found:
                yield path.name, " ".join(found[1].split())
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        for text in re.findall(r'"command": ("[^"]+")', path.read_text(encoding="utf-8")):
            yield path.name, json.loads(text)


PRINTED = sorted({(where, command) for where, command in printed()})


class Parsed(Exception):
    """The parser took the words."""


def parse_program(module: str, words: list[str], patched: pytest.MonkeyPatch) -> None:
    real = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        raise Parsed(real(parser, args, namespace))

    patched.setattr(argparse.ArgumentParser, "parse_args", parse)
    patched.setattr("sys.argv", [module, *words])
    with pytest.raises(Parsed):
        importlib.import_module(module).main()


def parse_command(words: list[str]) -> None:
    """By the commands' own parsers, a command of a group by the group's; no word may be left."""
    command, context = typer.main.get_command(app), None
    while command is not None:
        context = command.make_context(command.name, list(words), parent=context)
        protected = "_protected_args" if hasattr(context, "_protected_args") else "protected_args"  # click before 8.2
        words = [*getattr(context, protected), *context.args]
        find = getattr(command, "resolve_command", None)
        command, words = find(context, words)[1:] if find and words else (None, words)
    assert words == []


@pytest.mark.parametrize("where, command", PRINTED, ids=lambda text: text)
def test_its_parser_takes_it(
    where: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    for name in FILES & {*words}:
        (tmp_path / name).touch() if "." in name else (tmp_path / name).mkdir()
    module = words[2] if words[0] == "python" else "fusedvit"
    if module in ENGINES:
        pytest.importorskip("sglang")
    if module == "fusedvit":
        words = words[3:] if words[0] == "python" else words[1:]
        assert words == [] or words[0] in typer.main.get_command(app).commands  # type: ignore[attr-defined]
        if len(words) > 1:  # else a name in a sentence
            parse_command(words)
    else:
        parse_program(module, words[3:], monkeypatch)


def test_they_are_found() -> None:
    commands = {command for _, command in PRINTED}
    assert len(commands) > 50 and "fusedvit env" in commands and "python -m tests.trust --only F1" in commands
