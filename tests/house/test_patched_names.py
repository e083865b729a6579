"""What tests replace by its name is there: those that a machine cannot run, as of a GPU, would tell of it too late."""

from __future__ import annotations

import pkgutil
import re
from importlib.util import find_spec

import pytest

from tests.house.tree import ROOT

PATCH = re.compile(r'(?:setattr|patch)\(\s*"((?:tllm|tests)\.[\w.]+)"')


def test_every_name_that_a_test_replaces_is_there() -> None:
    named = {name for path in (ROOT / "tests").rglob("*.py") for name in PATCH.findall(path.read_text())}
    assert len(named) > 40
    if find_spec("triton") is None:
        named = {name for name in named if not name.startswith("tllm.kernels.gpu.")}
    for name in sorted(named):
        try:
            pkgutil.resolve_name(name)
        except AttributeError:
            pytest.fail(f"a test replaces {name}, which is not there")
