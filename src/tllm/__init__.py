"""together-LLM: one language model, split over several ordinary machines."""

__version__ = "0.1.0"
