"""Properties meet the same examples in every run of `make test`, and many others in `make soak-properties`."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

from tests.house.tree import ROOT
from tests.support.properties import EXAMPLES

DRAWS = """
import importlib
import sys

from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import register_profiles

register_profiles()
for name in sys.argv[1:]:
    importlib.import_module(name)

seen = []

@given(st.integers(), st.text(), st.floats(allow_nan=False))
def draw(number, text, fraction):
    seen.append((number, text, fraction))

draw()
print(seen)
"""


def drawn(*modules: str) -> str:
    words = [sys.executable, "-c", DRAWS, *modules]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=50).stdout


def test_the_examples_of_a_property_are_the_same_whatever_else_its_process_has_imported() -> None:
    first = drawn()
    assert len(set(ast.literal_eval(first))) > EXAMPLES // 2
    assert drawn("tllm.spec.plan", "tllm.planner.search.training_search") == first


def test_each_property_says_how_many_examples_it_takes_of_those_of_its_profile() -> None:
    """A number alone would be the same in `make soak-properties`."""
    alone = re.compile(r"max_examples=(?!examples\()")
    files = [file for file in (ROOT / "tests").rglob("*.py") if file.name != "properties.py"]
    assert not [str(file) for file in files if file.name != "test_properties.py" and alone.search(file.read_text())]
