"""`python -m tllm.cli` is `tllm`."""

from __future__ import annotations

import sys

from tllm.cli.main import main

sys.exit(main())
