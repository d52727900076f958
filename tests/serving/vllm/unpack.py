"""`python unpack.py FOLDER`: the Python files and the metadata of the wheel in a folder; the wheel goes."""

import sys
import zipfile
from pathlib import Path

for wheel in Path(sys.argv[1]).glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parent, [n for n in archive.namelist() if n.endswith(".py") or ".dist-info/" in n])
    wheel.unlink()
