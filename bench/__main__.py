"""Runs the benchmarks that need no GPU. Their rows of figures are written to bench/results/, and
the documents quote these rows."""

from bench import claims, restart

claims.main([])
restart.main(["--device", "cpu", "--shape", "tiny"])
