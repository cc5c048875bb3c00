"""The package as users get it: a wheel in an environment of its own, with any build of torch."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "harmonium"

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="needs the checkout"
)


def called(*command: object, cwd: Path, **more: str) -> str:
    """Run a command that sees nothing of this checkout; returns what it prints."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, **more},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of this checkout, for building one leaves files beside the source."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    left = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=left)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index")
    called(*pip, "--no-build-isolation", "--wheel-dir", copy / "dist", copy, cwd=copy)
    (built,) = (copy / "dist").iterdir()
    return built


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("harmonium/")}
    files = [path for path in SOURCE.rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(SOURCE.parent)) for path in files if path.suffix != ".pyc"}
    assert held == wanted
    assert {
        "harmonium/py.typed",
        "harmonium/recipe/library/demo.yaml",
        "harmonium/data/augment/views.yaml",
    } < held


def test_an_installed_wheel_runs_the_demonstration_away_from_the_source(
    wheel: Path, tmp_path: Path
) -> None:
    """Only the libraries come from here: their folder is a line in a `.pth` file."""
    made, away = tmp_path / "environment", tmp_path / "away"
    away.mkdir()
    called(sys.executable, "-m", "venv", "--without-pip", made, cwd=away)
    python = made / "bin" / "python"
    inside = sysconfig.get_path("purelib", vars={"base": str(made)})
    paths = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    Path(inside, "libraries.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
    called(*pip, "--no-deps", "--no-index", wheel, cwd=away)
    code = "import harmonium, sys; print(harmonium.__file__); print(*sys.path, sep='\\n')"
    where, *path = called(python, "-c", code, cwd=away).splitlines()
    assert where.startswith(inside)
    assert str(SOURCE.parent) not in path
    small = ("rounds=2", "data.limit=300", "engine.workers=0", "evaluate.labels_per_class=[]")
    words = (*small, "--json", "--out", "run")
    home = str(tmp_path / "home")
    shown = called(made / "bin" / "harmonium", "run", "demo", *words, cwd=away, HARMONIUM_HOME=home)
    assert [row["round"] for row in json.loads(shown)["rounds"]][-1] == 2
    assert (away / "run" / "encoder.safetensors").is_file()


def test_every_build_of_the_pinned_torch_meets_the_constraint() -> None:
    """Builds are told apart by the part after the plus sign, and none may be asked for."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pin = next(line.removeprefix("torch") for line in pins if line.startswith("torch=="))
    for build in ("", "+cpu", "+cu126", "+cu130", "+rocm6.4", "+xpu"):
        assert SpecifierSet(pin).contains(pin.removeprefix("==") + build)


def test_make_accepts_whatever_pip_brings(tmp_path: Path) -> None:
    """A stand-in for Python brings CUDA's packages and torchvision: the environment is made."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    stub = tmp_path / "python"
    stub.write_text(
        "#!/bin/sh\n"
        'echo "$@" >> calls\n'
        'case "$*" in\n'
        '*venv*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;;\n'
        "*list*|*freeze*) printf 'nvidia-cublas-cu12 12.8\\ntorch 2.13.0+cu128\\n"
        "torchvision 0.28.0\\n';;\n"
        "esac\n"
    )
    stub.chmod(0o755)
    called(make, ".venv/ready", f"PYTHON={stub}", cwd=tmp_path)
    assert (tmp_path / ".venv" / "ready").exists()
    installs = [line for line in (tmp_path / "calls").read_text().splitlines() if "install" in line]
    assert installs and all(re.search(r"constraint[= ]constraints\.txt", one) for one in installs)
