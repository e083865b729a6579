"""How a benchmark writes its results: a short page for people and the raw figures beside it."""
