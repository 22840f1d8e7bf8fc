"""ASGI middlewares inside vLLM's API server. vLLM loads them by its option `--middleware`.

A request passes the middlewares in this order (`_arguments` in `server/command.py`), and then
reaches vLLM's own routes:

1. `api_keys.py`, only with several or named API keys, replaces a known key by vLLM's own key.
2. `guard.py` protects the admin routes.
3. `fine_tuned.py` accepts OpenAI's form of the names of fine-tuned models.
4. `rollout.py` is the rollout door: routes that record the sampled tokens of clients that are not
   made for training.
5. `readiness.py`, only in one of several servers, decides whether this server answers requests.
6. `merged_server.py`, only with merged weights, executes the publisher's orders, and makes requests
   wait during a swap of weights.

The other modules help these middlewares. `asgi.py` has the functions that several middlewares use.
For the rollout door, `dialects.py` reads requests and answers, `sessions.py` keeps the turns of
each rollout, and `continuation.py` makes vLLM continue the turns' tokens. For merged weights,
`orders.py` parses the publisher's orders, and `weight_versions.py` adds to each answer the names of
the weights that sampled it.

The middlewares import neither torch nor vLLM. If they need a change of a function of vLLM, they
call `server/patches.py`.
"""
