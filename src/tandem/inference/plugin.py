"""A vLLM plugin (entry point `vllm.general_plugins`): the engine's processes die with the process that started them.

Without it, `kill -9` of the API server leaves the engine behind for ever, with all of the GPU's memory, and the server
that is started next finds none (vLLM 0.32; nor can the orphan be found by its environment, which it overwrites).
"""

from __future__ import annotations

import multiprocessing

from tandem.processes import die_with_parent


def register() -> None:
    """vLLM calls this in every process it starts, and in the API server, which is nobody's child in this sense."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid)
