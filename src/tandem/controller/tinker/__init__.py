"""Tinker's API, for programs that use the package `tinker`.

The routes are `routes_sessions.py`, `routes_training.py` and `routes_sampling.py`; they share
`service.py`. `passes.py` reads protobuf (`protobuf.py` has the messages), and `losses.py` turns it
into a request of the log. `models.py` makes runs. `futures.py` looks for results, and `results.py`
writes results as protobuf. `vllm.py` samples, and `samples.py` keeps samples in memory. `names.py`
has the names that the package expects. `errors.py` has its way to send keys and its use of
statuses.
"""
