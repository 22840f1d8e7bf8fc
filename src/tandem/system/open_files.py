"""Raises the limit on the number of files and connections that this process may open."""

import resource
import sys
from contextlib import suppress

# Linux allows at most 2**20 open files unless fs.nr_open was changed. On macOS, the maximum is
# kern.maxfilesperproc.
_MOST = 10240 if sys.platform == "darwin" else 2**20


def allow_many_open_files() -> None:
    """Raises the limit on open files as far as the system allows. Many shells and services allow
    only 1024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
