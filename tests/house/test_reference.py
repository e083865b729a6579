"""docs/reference says what the code says: pages made from it are up to date, exit codes are those of the errors."""

from __future__ import annotations

import argparse
import importlib.util
import re
from types import ModuleType

import pytest

from tests.house.tree import ROOT
from tllm.cli.main import PIPE_CLOSED
from tllm.core import errors
from tllm.core.errors import INTERRUPTED

REFERENCE = ROOT / "docs" / "reference"
MADE = ("api-surface.md", "commands.md", "http.md", "job-keys.md", "metrics.md", "python.md")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = ROOT / "docs" / "generate_reference.py"
    spec = importlib.util.spec_from_file_location("generate_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generator: ModuleType) -> dict[str, str]:
    made: dict[str, str] = generator.pages()
    return made


def test_every_made_page_is_listed(pages: dict[str, str]) -> None:
    index = (REFERENCE / "index.md").read_text()
    assert sorted(pages) == sorted(MADE)
    assert not [name for name in MADE if f"]({name})" not in index]


@pytest.mark.parametrize("name", MADE)
def test_page_is_what_the_code_says(name: str, pages: dict[str, str], generator: ModuleType) -> None:
    committed = (REFERENCE / name).read_text()
    assert committed == pages[name], f"docs/reference/{name} is out of date; hint: run {generator.COMMAND}"


def test_a_name_without_a_meaning_is_an_error(generator: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"meanings.toml, \[settings\]: add \['b'\], take out \['c'\]"):
        generator.check_names("settings", ["a", "c"], ["a", "b"])


def test_a_default_of_another_checkout_is_no_default(generator: ModuleType) -> None:
    action = argparse.ArgumentParser().add_argument("--model", default=ROOT.parent / "another" / "models" / "tiny")
    with pytest.raises(ValueError, match="another/models/tiny is not in"):
        generator.default_of(action)


def test_a_switch_that_is_on_by_itself_says_so(generator: ModuleType) -> None:
    """The page had `off` for the prefix cache, beside a meaning that ends with "(yes)"."""
    parser = argparse.ArgumentParser()
    switch = parser.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True)
    assert generator.default_of(switch) == "`on`"
    assert generator.default_of(parser.add_argument("--quiet", action="store_true")) == "`off`"


def test_a_size_has_a_unit(generator: ModuleType) -> None:
    parser = argparse.ArgumentParser()
    assert generator.default_of(parser.add_argument("--kept", default=256 << 20, metavar="SIZE")) == "`256MiB`"
    assert generator.default_of(parser.add_argument("--disk", default=32 << 30, metavar="SIZE")) == "`32GiB`"


def test_exit_codes_are_those_of_the_errors() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TllmError)]
    expected = {kind.__name__: kind.exit_code for kind in kinds}
    expected["RequestError"] = errors.ConfigError.exit_code  # what a command makes of it
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", (REFERENCE / "exit-codes.md").read_text(), re.MULTILINE)
    listed = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == expected, "docs/reference/exit-codes.md and core/errors.py differ"
    codes = {int(code) for code, _ in rows}
    assert codes == {0, *expected.values(), INTERRUPTED, PIPE_CLOSED}
