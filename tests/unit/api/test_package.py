"""`import tllm` offers the API, and loads it only when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tllm


def test_every_name_is_there() -> None:
    assert {name for name in tllm.__all__ if getattr(tllm, name, None) is None} == set()


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        tllm.LMM  # noqa: B018


def test_torch_waits_until_a_model_is_made() -> None:
    program = "import sys, tllm; tllm.LLM, tllm.SamplingParams; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
