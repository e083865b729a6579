"""`python -m tllm.cli` is `tllm`."""

from __future__ import annotations

import sys

from tllm.cli.entry import main

sys.exit(main())
