"""vLLM's command line, and the code that runs inside vLLM's server.

`command.py` makes the command line, `guard.py` closes the admin routes, and `plugin.py` runs in
each of vLLM's processes. `serve.py` waits for GPU memory. `rollout.py` is the rollout door: routes
that record the sampled tokens of clients that are not made for training. For the rollout door,
`dialects.py` reads requests and answers, `sessions.py` keeps the turns of each rollout, and
`continuation.py` makes vLLM continue the turns' tokens. `merged_server.py` executes the publisher's
orders (`orders.py`), and makes requests wait during a swap of merged weights. `weight_versions.py`
adds to each answer the names of the weights that sampled it. `readiness.py` decides whether one of
several servers answers. `fine_tuned.py` accepts the model names of OpenAI's API.
"""
