"""Runs the benchmarks that need no GPU; raw rows go to bench/results/, which is what docs quote."""

from bench import claims, restart

claims.main([])
restart.main(["--device", "cpu", "--shape", "tiny"])
