"""Raises the limit on the number of files and connections that this process may open."""

import resource
import sys
from contextlib import suppress

# Linux allows at most 2**20 unless fs.nr_open was changed, macOS at most kern.maxfilesperproc.
_MOST = 10240 if sys.platform == "darwin" else 2**20


def allow_many_open_files() -> None:
    """Raise the limit as far as the system allows; many shells and services allow 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
