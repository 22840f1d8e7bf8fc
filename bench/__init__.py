"""Benchmarks. Benchmarks. `python -m bench` runs the benchmarks that need no GPU. Compared figures
are measured in the same run."""
