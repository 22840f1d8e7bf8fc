"""Benchmarks. `python -m bench` runs those that need no GPU; what is compared is measured in the
same run."""
