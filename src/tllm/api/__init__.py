"""What Python programs call. Their process is asked to compute as a command's does before anything here loads torch."""

from tllm.core.program import ask_torch

ask_torch()
