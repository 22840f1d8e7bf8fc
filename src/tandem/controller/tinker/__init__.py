"""Tinker's API, for programs that use the package `tinker`.

The routes are `routes_sessions.py`, `routes_training.py` and `routes_sampling.py`; they share the
state in `service.py`. `passes.py` reads the protobuf body of a forward or backward pass
(`protobuf.py` has the messages). `losses.py` turns the pass into a request that the session's
request log can store (`spool/requests.py`). `models.py` makes runs. `futures.py` looks for results,
and `results.py` writes results as protobuf. `vllm.py` samples at vLLM, and `samples.py` keeps
samples in memory. `names.py` has the names that the package expects. `errors.py` handles the
package's form of keys and its use of HTTP statuses.
"""
