"""The trainer: the runner, which claims jobs, and the ranks, which train.

`runner/` decides about jobs, `executor/` runs an attempt's processes, `launch/` starts ranks, and
`rank/` is a rank's program. `warm.py` keeps a model in a node's page cache. torch is imported in
`rank/` only.
"""
