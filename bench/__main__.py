"""Runs the benchmarks that need no GPU. The benchmarks write their figures to bench/results/, and
the documents quote these figures."""

from bench import claims, restart

claims.main([])
restart.main(["--device", "cpu", "--shape", "tiny"])
