"""kernels/ and model_configs/ install inside the package, as a wheel and editable."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = {"kernels": "speculators_ext.kernels", "model_configs": "speculators_ext.model_configs"}
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
# Where the mapped folders are found from, without importing what needs other packages.
WHERE = """
from importlib.util import find_spec
from pathlib import Path
for name in ("speculators_ext", "speculators_ext.kernels", "speculators_ext.model_configs"):
    print(Path(find_spec(name).origin).parent)
(folder,) = find_spec("speculators_ext.model_configs").submodule_search_locations
assert list(Path(folder).glob("*.json")), "no preset"
"""
LOAD_PRESETS = """
from speculators_ext import model_configs
print(*(model_configs.load(name).method for name in model_configs.names()))
"""


def command(*words: str, path: Path | str | None = None, cwd: Path) -> str:
    """Run `words` in `cwd` with only `path` added to the search path; return its output."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env["PYTHONSAFEPATH"] = "1"
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads: building in the checkout would leave build/ behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("speculators_ext", "kernels", "model_configs"):
        copytree(ROOT / name, folder / name, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)),
        str(source),
        cwd=out,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    command(*PIP, "--no-deps", "--target", str(target), str(wheel), cwd=target)
    return target


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a virtual environment that holds setuptools and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    command(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for file in distribution("setuptools").files or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            copied = packages / file
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(file.locate().read_bytes())
    return str(folder / "bin" / "python")


def test_the_list_of_packages_is_complete() -> None:
    """Catches a new folder that the hand-written list forgot: the wheel would lack it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for name in ("speculators_ext", *MAPPED)
        for init in (ROOT / name).rglob("__init__.py")
    }
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(MAPPED.get(name, name) for name in folders)
    without_init = {
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / "speculators_ext").rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert without_init == set()


def test_the_wheel_holds_every_file(source: Path, wheel: Path) -> None:
    """Catches code or data left out of the wheel, and a top-level `kernels` left in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "speculators_ext").rglob("*")
        if path.is_file()
    }
    for folder, package in MAPPED.items():
        wanted |= {
            f"{package.replace('.', '/')}/{path.name}" for path in (source / folder).iterdir()
        }
    assert wanted - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "speculators_ext"
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_from_anywhere(installed: Path, tmp_path: Path) -> None:
    """Catches packages or presets that are found in the checkout only."""
    package = installed / "speculators_ext"
    printed = command(sys.executable, "-c", WHERE, path=installed, cwd=tmp_path).split()
    assert printed == [str(package), str(package / "kernels"), str(package / "model_configs")]
    methods = command(sys.executable, "-c", LOAD_PRESETS, path=installed, cwd=tmp_path).split()
    assert len(methods) == len(list((ROOT / "model_configs").glob("*.json"))) > 0


def test_an_editable_install_works_from_anywhere(
    source: Path, bare_python: str, tmp_path: Path
) -> None:
    """Catches the mapped folders missing from, or the root exposed by, `pip install -e .`."""
    command(
        *(*PIP[:3], "--python", bare_python, *PIP[3:]),
        *("--no-deps", "--no-build-isolation", "--editable", str(source)),
        cwd=tmp_path,
    )
    printed = command(bare_python, "-c", WHERE, cwd=tmp_path).split()
    assert printed == [str(source / name) for name in ("speculators_ext", *MAPPED)]
    kernels = "from importlib.util import find_spec; print(find_spec('kernels'))"
    assert command(bare_python, "-c", kernels, cwd=tmp_path).strip() == "None"


def test_kernels_still_means_hugging_faces_package(
    installed: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Catches a collision with the PyPI package `kernels`, which transformers and SGLang import."""
    target = tmp_path_factory.mktemp("huggingface")
    fetched = subprocess.run(
        [*PIP, "--retries", "1", "--no-deps", "--target", str(target), "kernels"],
        capture_output=True,
        text=True,
        check=False,
    )
    if fetched.returncode != 0:
        pytest.skip(f"PyPI's `kernels` cannot be fetched: {fetched.stderr.strip()[-200:]}")
    code = (
        "import kernels, transformers.integrations.hub_kernels, speculators_ext.kernels\n"
        "print(kernels.__file__, speculators_ext.kernels.__file__)"
    )
    both = f"{installed}{os.pathsep}{target}"
    printed = command(sys.executable, "-c", code, path=both, cwd=tmp_path).split()
    assert printed == [
        str(target / "kernels" / "__init__.py"),
        str(installed / "speculators_ext" / "kernels" / "__init__.py"),
    ]
