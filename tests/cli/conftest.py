from __future__ import annotations

from api_server import no_jobs_left, root, server  # noqa: F401
