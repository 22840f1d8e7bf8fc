"""The trainer: the runner, which claims jobs, and the ranks, which train.

`runner/` claims jobs and records their ends. `executor/` runs the processes of an attempt at a job.
`launch/` starts ranks, and `rank/` is a rank's program. `warm.py` keeps a model in a node's page
cache. The runner's own process imports no torch.
"""
