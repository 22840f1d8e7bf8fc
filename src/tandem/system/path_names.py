"""Names of paths that are freed: Python 3.12 never frees an interned string, and its pathlib
interns parts of paths.

So a program that handles files of each job would grow by 120 bytes for each of their names. Python
3.13 frees them.
"""

import pathlib
import sys
from types import SimpleNamespace


def free_path_names() -> None:
    """Has pathlib intern no names in this process. For programs that run for long; call it as they
    start."""
    if sys.version_info[:2] == (3, 12):
        vars(pathlib)["sys"] = SimpleNamespace(**vars(sys) | {"intern": str})
