"""Models with random weights, in the shapes that several benchmarks use."""
