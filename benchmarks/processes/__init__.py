"""Child processes of benchmarks: how they are started, watched and made to take turns."""
