"""The step loop. The package deals with no files and no processes.

`steps.py` is the loop of a job. `rows.py` computes rows and sums their gradients, for jobs and
sessions. `losses.py` and `preference_loss.py` have each loss, with its source. `schedule.py`
assigns rows to ranks and computes the denominators over all ranks. `optimizer.py` is Adam for
adapters; `sharded_adam.py` is Adam for all weights. The learning rate's schedule is `Schedule` in
`spool/schema/training.py`. `phases.py` measures seconds and bytes.
"""
