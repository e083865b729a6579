"""Tokens: text to ids, ids to text as they arrive, chat templates, stop strings. No torch."""
