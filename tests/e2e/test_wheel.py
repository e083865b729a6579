"""A wheel built from the repository: all that the program needs is in it, and the command runs from it alone."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import tllm
from tests.house.tree import ROOT, SOURCE
from tllm.kernels.instruction_sets import FOLDER, INSTRUCTION_SETS, supported

KERNELS = SOURCE / "kernels" / FOLDER

pytestmark = pytest.mark.timeout(300)  # the kernels are compiled for four sets of instructions


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tracked files, so that nothing is written into the checkout.

    The kernels of the checkout go with it, which `make setup` has compiled by the same function; only those that are
    older than their sources are compiled again.
    """
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    wanted = ["src", "setup.py", "MANIFEST.in", "pyproject.toml", "README.md", "LICENSE"]
    listed = subprocess.run(["git", "ls-files", "-z", *wanted], **HERE)
    for name in listed.stdout.rstrip("\0").split("\0"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    shutil.copytree(KERNELS, copy / KERNELS.relative_to(ROOT), dirs_exist_ok=True)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(copy)]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *build], check=True)
    return next(out.glob("*.whl"))


HERE = dict(cwd=ROOT, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tllm` of an environment with the wheel alone; the libraries it depends on are those of this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(packages), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *install], check=True)
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin" / "python"


def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "src/tllm"], **HERE).stdout.rstrip("\0").split("\0")
    expected = {name.removeprefix("src/") for name in listed if "/csrc/" not in name}
    expected |= {f"tllm/kernels/lib/{one.file}" for one in INSTRUCTION_SETS if one.machine == platform.machine()}
    held = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= held
    assert not [name for name in held if "/csrc/" in name], "what kernels are compiled from"
    assert wheel.name.endswith(f"-py3-none-manylinux2014_{platform.machine()}.whl")


@pytest.mark.slow
def test_help_and_the_demonstration_run_from_it(command: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(command), *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    place = run("-c", "import tllm; print(tllm.__file__)").strip()
    assert not Path(place).is_relative_to(SOURCE), "the checkout's own package was taken"
    kernels = run("-c", "from tllm.kernels.library import library; print(library().instruction_set.name)")
    assert kernels.strip() == supported()[0].name
    assert run("-m", "tllm.cli", "--version") == f"tllm {tllm.__version__}\n"
    assert "usage: tllm COMMAND" in run("-m", "tllm.cli", "--help")
    shown = run("-m", "tllm.cli", "demo", "--serve-only", "--max-tokens", "20")
    assert "all 20 tokens of 3 processes are those of one" in shown
