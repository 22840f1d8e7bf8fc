"""Runs the benchmarks that need no GPU; raw rows go to bench/results/, which is what docs quote."""

from bench import launch, packing

for part in (packing, launch):
    part.main()
