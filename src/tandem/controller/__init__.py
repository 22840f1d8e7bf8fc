"""The HTTP API: it validates requests, writes them to the spool, and reports the spool's state. It
uses no GPU and no torch.

`routes_*.py` have the routes, `http_errors.py` the statuses and bodies of errors,
`event_streams.py` the streams (SSE), `middleware.py` keys and sizes. `openai/` is OpenAI's
fine-tuning API, `tinker/` Tinker's API.
"""
