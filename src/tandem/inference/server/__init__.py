"""vLLM's command line, and the code that runs inside vLLM's server.

`command.py` makes the command line, `guard.py` protects the admin routes, and `plugin.py` runs in
each of vLLM's processes. `serve.py` starts vLLM when its GPUs are free. `rollout.py` is the rollout
door: routes that record the sampled tokens of clients that are not made for training. `dialects.py`
reads the rollout door's requests and answers. `sessions.py` keeps the turns of each rollout, and
`continuation.py` makes vLLM continue the turns' tokens. `merged_server.py` executes the publisher's
orders (`orders.py`), and makes requests wait during a swap of merged weights. `weight_versions.py`
adds to each answer the names of the weights that sampled it. `readiness.py` decides whether this
server, one of several, answers requests. `fine_tuned.py` accepts OpenAI's form of the names of
fine-tuned models.
"""
