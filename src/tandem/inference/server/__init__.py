"""vLLM's command line, and what runs in vLLM's server beside vLLM.

`command.py` makes the command line, `guard.py` closes the admin routes, and `plugin.py` runs in
each of vLLM's processes. `serve.py` waits for GPU memory. `rollout.py` is the door for clients that
know nothing of training. For it `dialects.py` reads requests and answers, `sessions.py` keeps the
turns of each rollout, and `continuation.py` has vLLM continue their tokens. `merged_server.py`
carries out the publisher's orders (`orders.py`) and holds requests during a swap of merged weights.
`weight_versions.py` tells in answers from which weights they came. `readiness.py` lets one of
several servers answer. `fine_tuned.py` takes the names of OpenAI's API.
"""
