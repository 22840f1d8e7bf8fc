"""The program that claims jobs, starts attempts and records how they end; without torch.

`loop.py` asks `spool/queue.py` for the next job. `job.py` watches a job's attempts and ends them.
`failure.py` says why ranks failed. `joblog.py` copies the ranks' output.
"""
