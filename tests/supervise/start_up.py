"""python -m start_up: runs `tandem up` with short bounds. The environment variables name the role
and, as JSON, the programs."""

import json
import os
import sys
from pathlib import Path

from tandem.config import Settings
from tandem.supervise import supervisord, up, watchdog
from tandem.supervise.supervisord import Program

write_config = supervisord.write_config


def write_config_with_retries(*arguments) -> Path:
    path, retries = write_config(*arguments), os.environ.get("FAKE_RETRIES", "3")
    # If a program ends within this number of seconds, its start counts as failed.
    seconds = os.environ.get("FAKE_START_SECONDS", "1")
    more = f"startretries = {retries}\nstartsecs = {seconds}\nautorestart"
    path.write_text(path.read_text().replace("autorestart", more))
    return path


if __name__ == "__main__":
    up.MOST_CRASHES = int(os.environ.get("FAKE_CRASHES", "1"))
    up.TRY_AGAIN_SECONDS = 1
    up.LEFTOVER_SECONDS = float(os.environ.get("FAKE_LEFTOVER", "3"))
    watchdog._TIMEOUT_SECONDS = 1.5
    if os.environ.get("FAKE_READY"):
        up.health.problems = lambda *_: []
    supervisord.write_config = write_config_with_retries
    programs = [Program(stop_seconds=2, **fields) for fields in json.loads(os.environ["PROGRAMS"])]
    sys.exit(up.up(Settings(), os.environ["ROLE"], programs))
