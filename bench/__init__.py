"""Benchmarks. `python -m bench` runs the benchmarks that need no GPU. Figures that are compared
with each other are measured in the same run."""
