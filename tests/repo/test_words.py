"""Sources, tests, docs and messages use the field's words, not words of this project's own.

Each pattern has the word that stands instead. Plain English uses of the same words match none of the patterns.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.source_rules import text_files

ROOT = Path(__file__).resolve().parents[2]
SELF = "tests/repo/test_words.py"

# Names, split into lower-case words: `RunBeside` is `run beside`. File names count as names.
NAMES = {
    r"beside|(?<!told )(?<!taken )apart": "overlap, separate",
    r"guess\w*(?! type)|mispredicted": "speculative, prediction, misprediction",
    r"looks?(?! up)|looked(?! up)": "check, change detection",
    r"watch(?! data)|watche[sd]": "check, change detection",
    r"twins?": "reference",
    r"admits?|admitted": "load_inputs",
    r"hand(s|ed)? over": "store_outputs",
    r"alternating|in turns": "pingpong",
    r"hopper transposed|transposed (?!conv)\w+": "swap_ab",
    r"(begin|begins|begun|launch|launches) (early|late)|early rows|overlap rows": "pdl",
    r"(?<!other )forms?(?! of grid)": "backend, variant",
    r"(is|are|still|stays?) true|true weights": "unchanged",
    r"rings?": "stages, pipeline",
    r"(rope|rotary|cos sin) words?": "packed_cos_sin",
    r"asked again": "tuned again",
}
NAMES_IN_SOURCES = {
    r"made|making": "weights_version, prepared, built",
    r"(?<!in )places?": "slots, descriptors",
}

# Phrases of comments, docstrings, messages and pages; a blank stands for any white space and comment signs.
PHRASES = {
    r"beg[iu]ns? (early|late)|beginning early|early launch(es)?": "programmatic dependent launch (PDL)",
    r"(in|by) turns": "ping-pong (a kernel); interleaved (contenders)",
    r"the other way round": "swap-AB",
    r"transposed (form|kernel|product|gemm|tile)s?|the transposed one": "swap-AB",
    r"alternating (form|kernel|gemm|product)s?": "ping-pong",
    r"(the|a|its|this|of) ring('s)?|ring of \w+|rings of": "multistage pipeline, stages",
    r"(rotary|rope) words": "packed cos/sin",
    r"guess(es|ed|ing)?": "speculative replay, prediction",
    r"mispredicted": "misprediction",
    r"(the|a|each|every|one|this|first|next) look (at|of|takes|is|was|has|costs)|looks? at the weights": "check",
    r"(weights|parameters) (is|are|was|were) (looked at|watched)|watch(es|ing)? (the )?weights": "change detection",
    r"weights (is|are|were|was)? ?(made|being made) (anew|again|from|of)|made anew|making (of )?weights": "prepare",
    r"admit(s|ted|ting)?": "load inputs",
    r"hand(s|ed|ing)? (it |them )?over": "store outputs; pass",
    r"(hopper|gluon|kernel|cublaslt)('s)? forms?|which form|forms? (in|of) (gluon|triton|plain)": "backend, variant",
    r"twins?": "reference",
    r"(asked|asks|asking) again|asked the tuner": "tuned",
    r"(blocks?|mergers?|launch(es)?|kernels?|runs?|replays?) beside": "overlapped with",
    r"beside (the |its |other |their )?(blocks?|mergers?|launch(es)?|graphs?|replays?)": "overlapped with",
}


def words_of(name: str) -> str:
    """`runBeside_blocks` -> `run beside blocks`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", " ", name).lower().strip()


def private_names(text: str, path: str) -> Iterator[str]:
    """Names in a Python file, and the file's own."""
    patterns = NAMES if path.startswith("tests/") else NAMES | NAMES_IN_SOURCES
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    names = [(token.start[0], token.string) for token in tokens if token.type == tokenize.NAME]
    for line, name in [(0, Path(path).stem), *names]:
        for pattern, instead in patterns.items():
            if re.search(rf"\b(?:{pattern})\b", words_of(name)):
                yield f"{path}:{line}: {name} (instead: {instead})"


def private_phrases(text: str, path: str) -> Iterator[str]:
    for pattern, instead in PHRASES.items():
        spaced = pattern.replace(" ", r"(?:\s|#)+")
        for match in re.finditer(rf"\b(?:{spaced})\b", text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}: {' '.join(match.group().split())} (instead: {instead})"


def private_words(text: str, path: str) -> list[str]:
    names = private_names(text, path) if path.endswith(".py") else ()
    return [*names, *private_phrases(text, path)]


def pages(root: Path) -> Iterator[str]:
    """Paths of every text that somebody writes. Measured documents and tuning tables are data."""
    for path in text_files(root):
        name = path.relative_to(root).as_posix()
        if name != SELF and path.suffix != ".json" and not name.startswith("bench/results/"):
            yield name


def test_no_private_words() -> None:
    assert [hit for path in pages(ROOT) for hit in private_words((ROOT / path).read_text(encoding="utf-8"), path)] == []


@pytest.mark.parametrize(
    "text",
    [
        "class MergersBeside: ...",
        "def run_apart(): ...",
        "guess = plan",
        "stats.mispredicted = 1",
        "def look(): ...",
        "def watched(x): ...",
        "def test_kernel_is_its_twin(): ...",
        "def admit_ref(x): ...",
        "def hand_over(x): ...",
        "from fusedvit.kernels.hopper import alternating",
        "def hopper_transposed_config(): ...",
        "begins_early = True",
        "class FormFailed(Exception): ...",
        "weights_made = 1",
        "still_true = weights",
        "RING = 4",
        "rope_words = pack(cos, sin)",
        "class _Place: ...",
        "# proj begins early",
        "# Two consumers in turns.",
        "# w x^T: the other\n# way round.",
        "# A ring of stages",
        "# Reads the ring's slots.",
        "# Rotary words come by TMA.",
        "# A wrong guess is dropped.",
        "# The look at the weights costs 20 us.",
        "# Weights are made anew.",
        "# Pixels are admitted.",
        "# The outputs are handed over.",
        "# Hopper's forms in Gluon",
        "# Compared with its twin.",
        "# The tuner asks again.",
        "# Deepstack mergers run beside the blocks.",
    ],
)
def test_private_words_are_noticed(text: str) -> None:
    assert private_words(text + "\n", "kernels/a.py") != []


def test_plain_english_passes() -> None:
    text = (
        '"""Tells blocks apart by a lookup; a string beside a string, kept in place, in the form (t, h, w)."""\n'
        "looked_up = in_place = watch_data = string = taken_apart = True  # the earlier of two launches in turn\n"
        "transposed_conv = x.transpose(0, 1)  # a transposed convolution is made of strings; look it up\n"
    )
    assert private_words(text, "kernels/a.py") == []
