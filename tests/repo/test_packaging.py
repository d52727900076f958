"""The layout: kernels/, graphs/ and bench/ are modules of fusedvit, and never stand in the way of another `kernels`.

Every case runs in an interpreter of its own, since what is asked is what an import finds.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.2.0"
SOURCES = ("fusedvit", "kernels", "graphs", "bench")
QWEN = "from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel\n"


def python(code: str, cwd: Path, *path: Path, executable: str = sys.executable, flags: tuple[str, ...] = ()) -> object:
    """What `code` leaves in `answer`, run in `cwd` with `path` in front of sys.path. JSON both ways."""
    before = os.environ.get("PYTHONPATH")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), *([before] if before else [])])}
    script = f"import json\n{code}\nprint(json.dumps(answer))"
    done = subprocess.run(
        [executable, *flags, "-c", script], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def copied_sources(tmp_path_factory) -> Path:
    """A copy of what a wheel is built from: the build writes into the folder that it runs in."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend is older than pyproject.toml asks for")
    root = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    (root / "kernels" / "tuned").mkdir(exist_ok=True)
    (root / "kernels" / "tuned" / "some-gpu.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def wheel(copied_sources, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(out), str(copied_sources)], check=True, timeout=300)
    (built,) = out.glob("*.whl")
    return built


def test_folders_outside_the_package_are_no_packages():
    assert [str(path) for name in SOURCES[1:] for path in (ROOT / name).rglob("__init__.py")] == []


def test_every_folder_of_sources_is_listed():
    """pyproject.toml's packages are the folders that hold Python files: a folder that it forgets is not installed."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for name in SOURCES for path in (ROOT / name).rglob("*.py")}
    names = {".".join(folder.parts) for folder in folders if "results" not in folder.parts}
    assert set(listed) == {name if name.split(".")[0] == "fusedvit" else f"fusedvit.{name}" for name in names}


def test_import_is_light():
    heavy = ("torch", "triton", "transformers", "numpy")
    code = f"import sys, fusedvit\nanswer = [name for name in {heavy} if name in sys.modules]"
    assert python(code, ROOT) == []


def test_public_names_are_those_listed():
    code = "import fusedvit\nanswer = [fusedvit.__version__, sorted(fusedvit.__all__) == dir(fusedvit)]"
    assert python(code, ROOT) == [VERSION, True]
    code = "import fusedvit\ntry:\n    fusedvit.fuze\nexcept AttributeError as error:\n    answer = str(error)"
    assert python(code, ROOT) == "module 'fusedvit' has no attribute 'fuze'"


@pytest.mark.parametrize("first", ["import fusedvit.kernels.tile_configs\n", ""], ids=["ours first", "theirs first"])
def test_qwen_imports_from_the_root(first):
    """There `import kernels` finds our folder as a namespace, unless a real one is installed: both are fine."""
    code = f"{first}{QWEN}import fusedvit.kernels.tile_configs as ours\n"
    code += "from transformers.utils import import_utils\n"
    code += "answer = [ours.__name__, ours.__file__, import_utils.is_torch_available()]"
    assert python(code, ROOT) == ["fusedvit.kernels.tile_configs", str(ROOT / "kernels" / "tile_configs.py"), True]


def test_a_regular_kernels_package_wins(tmp_path):
    """Although the root comes first on sys.path, as it does with `python -c` and `python -m` there."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("mark = 'theirs'\n")
    code = "import sys, kernels, fusedvit.kernels.tile_configs as ours\n"
    code += "answer = [sys.path[0], kernels.mark, ours.__file__]"
    assert python(code, ROOT, tmp_path) == ["", "theirs", str(ROOT / "kernels" / "tile_configs.py")]
    assert python(f"{QWEN}import kernels\nanswer = kernels.mark", ROOT, tmp_path) == "theirs"


def test_import_from_another_folder(tmp_path):
    """The installation that runs these tests is an editable one, or has the root on its path."""
    code = (
        "import fusedvit.kernels.tile_configs as ours, fusedvit\nanswer = [ours.__file__, str(fusedvit.__path__[-1])]"
    )
    assert python(code, tmp_path, ROOT) == [str(ROOT / "kernels" / "tile_configs.py"), str(ROOT)]


def test_editable_installation(copied_sources, tmp_path):
    """Installed into an empty environment, imported from a folder outside the checkout."""
    venv.create(tmp_path / "env", with_pip=False, system_site_packages=False)
    executable = tmp_path / "env" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(executable), "install", "--quiet", "--no-deps"]
    paths = [path for path in sys.path if path.endswith("-packages")]  # the build backend of this environment
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([*command, "--no-build-isolation", "-e", str(copied_sources)], check=True, timeout=300, env=env)
    code = "import fusedvit, importlib.util as u\n"
    code += "answer = [u.find_spec('fusedvit.kernels.tile_configs').origin, u.find_spec('kernels') is None]"
    found = python(code, tmp_path, executable=str(executable), flags=("-E",))
    assert found == [str(copied_sources / "kernels" / "tile_configs.py"), True]


def test_wheel_holds_one_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"fusedvit", f"fusedvit-{VERSION}.dist-info"}
    expected = set()
    for folder in SOURCES:
        inside = "fusedvit" if folder == "fusedvit" else f"fusedvit/{folder}"
        expected |= {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    assert {f"fusedvit/assets/{path.name}" for path in (ROOT / "fusedvit" / "assets").glob("*")} <= set(names)
    assert "fusedvit/py.typed" in names
    tables = {"some-gpu.json", *(path.name for path in (ROOT / "kernels/tuned").glob("*.json"))}
    assert {f"fusedvit/kernels/tuned/{name}" for name in tables} <= set(names)


def test_a_wheel_that_is_not_unpacked(wheel, tmp_path):
    """As it is sent to workers, or put on sys.path. What kernels were compiled from is known there too."""
    code = "import fusedvit.bench.pixels, fusedvit.graphs, fusedvit.kernels.hopper\n"
    code += "from fusedvit.runtime import compiled_kernels\n"
    code += "answer = [compiled_kernels.tile_configs.__file__, compiled_kernels._sources()]"
    found, ours = python(code, tmp_path, wheel), python(code, tmp_path, ROOT)
    assert found == [str(wheel / "fusedvit" / "kernels" / "tile_configs.py"), ours[1]]
    code = "import importlib.util, fusedvit\nanswer = importlib.util.find_spec('fusedvit.nothing')"
    assert python(code, tmp_path, wheel) is None


def test_wheel_finds_its_own_modules_only(wheel, tmp_path):
    """Unpacked next to a package named `kernels` and somebody's pyproject.toml, it takes neither for ours."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "site" / "kernels").mkdir()
    (tmp_path / "site" / "kernels" / "__init__.py").write_text("")
    (tmp_path / "site" / "kernels" / "theirs.py").write_text("")
    (tmp_path / "site" / "pyproject.toml").write_text('[project]\nname = "another"\n')
    code = "import fusedvit, importlib.util as u\nanswer = [list(fusedvit.__path__), "
    code += "u.find_spec('fusedvit.kernels.tile_configs').origin, u.find_spec('fusedvit.kernels.theirs')]"
    inside = tmp_path / "site" / "fusedvit"
    assert python(code, tmp_path, tmp_path / "site") == [
        [str(inside)],
        str(inside / "kernels" / "tile_configs.py"),
        None,
    ]
