"""ASGI middlewares inside vLLM's API server. The option `--middleware` makes vLLM load the
middlewares.

A request passes the middlewares in this order (`_arguments` in `server/command.py`), and then
reaches vLLM's own routes:

1. `api_keys.py` replaces a known key by vLLM's own key. `api_keys.py` is loaded only if there are
   several API keys or named API keys.
2. `guard.py` protects the admin routes.
3. `fine_tuned.py` accepts OpenAI's form of the names of fine-tuned models.
4. `rollout.py` has the routes of the rollout door, which record the sampled tokens of clients that
   are not made for training.
5. `readiness.py` decides whether this server answers requests. `readiness.py` is loaded only if
   there are several servers.
6. `merged_server.py` executes the publisher's orders, and makes requests wait during a swap of
   weights. `merged_server.py` is loaded only with merged weights.

The other modules help these middlewares. `asgi.py` has the functions that several middlewares use.
For the rollout door, `dialects.py` reads requests and answers, `sessions.py` keeps the turns of
each rollout, and `continuation.py` makes vLLM continue the turns' tokens. For merged weights,
`orders.py` parses the publisher's orders, and `weight_versions.py` adds to each answer the names of
the weights that sampled the answer.

The middlewares import neither torch nor vLLM. Middlewares that need a changed function of vLLM call
`server/patches.py`.
"""
