"""The program that claims jobs, starts attempts and records how they end. Imports no torch.

`loop.py` asks `spool/queue.py` for the next job. `running.py` has the running jobs: one, or several
on a cluster. `job.py` watches a job's attempts and ends them. `waiting.py` records why an attempt
waits. `failure.py` finds out why ranks failed. `joblog.py` copies the ranks' output.
"""
