"""One document of families out of several runs: later answers win, and each says where it comes from."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Document = dict[str, Any]


def signed(document: Document) -> Document:
    """`document` with a passport in every family; one of a single run has it at the top alone."""
    families = {name: {"passport": document["passport"], **found} for name, found in document["families"].items()}
    return {**document, "families": families}


def merged(documents: Iterable[Document]) -> Document:
    """All families of `documents`, the later ones' answers before the earlier ones'; what a version of transformers
    lacks hides nothing that another had. The passport at the top is the last document's.

    Raises:
        ValueError: no document.
    """
    whole: Document = {}
    for document in map(signed, documents):
        known, new = whole.get("families", {}), document["families"]
        new = {name: found for name, found in new.items() if "absent" not in found or name not in known}
        whole = {**whole, **document, "families": known | new}
    if not whole:
        raise ValueError("expected at least one document")
    return whole


def load(paths: Iterable[Path]) -> list[Document]:
    """Those of `paths` that exist, in their order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def passports(documents: Iterable[Document]) -> list[dict[str, str]]:
    """Of the runs behind what was measured, each once."""
    found: list[dict[str, str]] = []
    for document in map(signed, documents):
        found += [f["passport"] for f in document["families"].values() if "parity" in f]
    return [passport for i, passport in enumerate(found) if passport not in found[:i]]
