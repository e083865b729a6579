"""What the pages say of files and packages is true: paths that they name exist, and the lock file is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.test_papers import locked, names, project
from tests.house.tree import ROOT, SOURCE, name_of

PAGES = sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = {p.name for p in SOURCE.iterdir() if p.is_dir()} | {"tests", "docs", "src", "benchmarks"}
NAMED = re.compile(r"`((?:[\w-]+/)+(?:[\w-]+\.(?:py|md|toml))?)`")
"""`engine/driver.py` or `training/optim/`: a path below src/tllm, or below the root."""


@pytest.mark.parametrize("page", [p for p in PAGES if p.is_relative_to(ROOT / "docs" / "inside")], ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    found = [name for name in NAMED.findall(page.read_text("utf-8")) if name.split("/")[0] in FOLDERS]
    missing = [name for name in found if not (SOURCE / name).exists() and not (ROOT / name).exists()]
    assert not missing, f"{name_of(page)} names {missing}, which do not exist"


def test_pictures_are_used_and_speak() -> None:
    """Each picture stands in a page, and has a title for those who cannot see it."""
    used = "".join(page.read_text("utf-8") for page in PAGES)
    for picture in sorted((ROOT / "docs").rglob("images/*.svg")):
        assert f"images/{picture.name}" in used, f"{name_of(picture)} stands in no page"
        assert "<title>" in picture.read_text("utf-8"), f"{name_of(picture)} has no title"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_the_lock_of_the_site_agrees_with_the_others() -> None:
    site, runtime, dev = (locked(f"requirements{which}.lock") for which in ("-docs", "", "-dev"))
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    assert names(extras["docs"]) <= set(site)
    assert not set(site) & set(runtime), "what tllm runs with is locked in requirements.lock alone"
    assert {name: site[name] for name in set(site) & set(dev)} == {name: dev[name] for name in set(site) & set(dev)}


def test_variables_of_ours_are_listed() -> None:
    """The page of the environment has every variable under our name that the source reads, and no other."""
    page = (ROOT / "docs" / "reference" / "environment.md").read_text("utf-8")
    source = "".join(path.read_text("utf-8") for path in SOURCE.rglob("*.py"))
    assert set(re.findall(r"`(TLLM_\w+)`", page)) == set(re.findall(r'"(TLLM_\w+)"', source))
