"""Which commit a document names."""

import subprocess
from pathlib import Path

from fusedvit.bench.records import commit_of


def test_a_folder_inside_a_checkout_is_not_the_checkout(tmp_path: Path) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    (tmp_path / "before").mkdir()
    assert len(commit_of(tmp_path)) == 40
    assert commit_of(tmp_path / "before") == "unknown" and commit_of(tmp_path / "absent") == "unknown"
