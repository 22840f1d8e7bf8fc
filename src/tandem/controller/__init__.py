"""The HTTP API: it validates requests, writes them to the spool, and reports the spool's state. The
package uses no GPU and no torch.

`routes_train.py` takes every job (`POST /v1/runs/<run>/train`). The other `routes_*.py` have runs,
jobs and checkpoints. `app.py` puts them together, and its thread removes old files every ten
minutes (`spool/removal.py`). `http_errors.py` has the statuses and bodies of errors,
`event_streams.py` the streams (SSE), `middleware.py` keys and sizes. `openai/` is OpenAI's
fine-tuning API, `tinker/` Tinker's API.
"""
