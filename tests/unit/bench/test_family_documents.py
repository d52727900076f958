"""Several runs over families make one document, in which each says where it comes from."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from fusedvit.bench import families, family_documents  # noqa: E402

OLD = {"passport": {"commit": "old"}, "families": {"A": {"parity": {}}, "B": {"parity": {}, "cost": {"1024": 1}}}}


def test_later_answers_win_and_keep_their_passports() -> None:
    new = {"passport": {"commit": "new"}, "families": {"B": {"parity": {}, "cost": {}}, "C": {"failed": "no room"}}}
    whole = family_documents.merged([OLD, new])
    assert {n: f["passport"]["commit"] for n, f in whole["families"].items()} == {"A": "old", "B": "new", "C": "new"}
    assert whole["families"]["B"]["cost"] == {} and whole["passport"] == new["passport"]
    again = family_documents.merged([whole, {"passport": {"commit": "third"}, "families": {}}])
    assert again["families"] == whole["families"]
    assert family_documents.passports([again]) == [OLD["passport"], new["passport"]], "of what was measured"


def test_what_transformers_lacks_hides_nothing() -> None:
    absent = {"passport": {"commit": "new"}, "families": {"A": {"absent": "…"}, "D": {"absent": "…"}}}
    found = family_documents.merged([OLD, absent])["families"]
    assert "parity" in found["A"] and "absent" in found["D"]


def test_the_command_adds_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(name: str, *_: Any) -> dict[str, Any]:
        if name == "GLM-OCR":
            raise RuntimeError("no room")
        return {"parity": {"odd image": {"passed": True}}}

    monkeypatch.setattr(families, "measure", measured)
    path, other = tmp_path / "f.json", tmp_path / "other.json"
    path.write_text(json.dumps(OLD))
    other.write_text(json.dumps({"passport": {"commit": "other"}, "families": {"E": {"parity": {}}}}))
    asked = ["--json", str(path), "--commit", "c0ffee", "--family"]
    assert families.main([*asked, "Qwen3-VL-4B", "GLM-OCR"]) == 0
    assert families.main([*asked, "--from", str(other)]) == 0
    found = json.loads(path.read_text())["families"]
    commits = {name: family["passport"]["commit"] for name, family in found.items()}
    assert commits == {"A": "old", "B": "old", "Qwen3-VL-4B": "c0ffee", "GLM-OCR": "c0ffee", "E": "other"}
    assert found["GLM-OCR"]["failed"] == "RuntimeError: no room"


def test_a_broken_rule_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"parity": {"odd image": {"passed": False}}}
    monkeypatch.setattr(families, "measure", lambda *_: broken)
    assert families.main(["--json", str(tmp_path / "f.json"), "--family", "Qwen3-VL-4B"]) == 1
