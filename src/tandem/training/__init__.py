"""The step loop: no files, no processes.

`steps.py` is the loop of a job. `rows.py` computes rows and adds their gradients up, for jobs and
sessions. `losses.py` has each loss with its source. `schedule.py` says which rank computes which
rows, and by what all ranks normalise. `optimizer.py` is Adam for adapters, `sharded_adam.py` for
all weights. `phases.py` measures seconds and bytes.
"""
