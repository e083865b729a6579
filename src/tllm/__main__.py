"""`python -m tllm` is `tllm`."""

from __future__ import annotations

import runpy

runpy.run_module("tllm.cli", run_name="__main__")
