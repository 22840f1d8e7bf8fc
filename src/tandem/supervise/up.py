"""`tandem up`: the programs of one container, or of all three on one machine, under one supervisord in the foreground.

This file checks that the programs can be started; `stack` starts them, watches over them and stops them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec

from tandem.config import Settings
from tandem.errors import Conflict, InvalidInput
from tandem.spool import Spool
from tandem.spool.locks import LockHeldError, file_lock
from tandem.supervise.console import Console
from tandem.supervise.programs import PROGRAMS, Program
from tandem.supervise.stack import Stack
from tandem.system import ports
from tandem.system.role import Role, runtime_dir


def up(settings: Settings, role: Role = "all", programs: Sequence[Program] | None = None) -> int:
    """Run the programs of `role` until Ctrl-C, SIGTERM or a crash loop; returns the exit status (see `stack`).

    Needs a process of its own: it changes the process's environment and umask, and ends all of its descendants. Raises
    InvalidInput, Conflict (a port is taken, or this role runs on this spool already) or SpoolUnusable before it starts
    anything.
    """
    if find_spec("supervisor") is None:
        raise InvalidInput("supervisor is not installed; install tandem-rl[cpu] or tandem-rl[gpu]")
    if role != "all":
        # Containers of one group share the volume, whatever their users.
        os.umask(0o002)
    programs = PROGRAMS[role] if programs is None else programs
    root = Spool.create(settings.root).root
    if any(program.name == "vllm" for program in programs):
        settings.model_path()
    logs = settings.log_dir or (root / "logs" if role == "all" else root / "logs" / role)
    logs.mkdir(exist_ok=True, parents=True)
    console = Console(logs, [program.name for program in programs], as_json=settings.log_format == "json")
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(runtime_dir(root, role) / "lock", blocking=False))
        except LockHeldError:
            raise Conflict(f"`tandem up` runs on {root} already; stop that one first", field="TANDEM_ROOT") from None
        for program in programs:
            if program.port is None:
                continue
            host, port = (getattr(settings, f"{program.port}_{part}") for part in ("host", "port"))
            try:
                held.enter_context(ports.reserve(port, host=host, name=f"{program.port}_port"))
            except Conflict as error:
                if program.essential:
                    raise
                console.say(f"{program.name} has to wait: {error}")
        return Stack(settings, role, logs, programs, console).run()
