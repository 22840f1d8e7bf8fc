"""Benchmarks. `python -m bench` runs the benchmarks that need no GPU. Compare figures only within
one run of a benchmark."""
