"""The HTTP API: it validates requests, writes them to the spool, and reports the spool's state. The
package uses no GPU and no torch.

`routes_train.py` accepts jobs of all kinds (`POST /v1/runs/<run>/train`). The other modules
`routes_*.py` have the routes of runs, jobs and checkpoints. `app.py` builds the application from
the routes, and its thread removes old files every ten minutes (`spool/removal.py`).
`http_errors.py` has the statuses and bodies of errors. `event_streams.py` has the event streams
(SSE). `middleware.py` checks keys and limits the sizes of bodies. `openai/` is OpenAI's fine-tuning
API, and `tinker/` is Tinker's API.
"""
