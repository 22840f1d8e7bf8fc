"""Write the dashboards: `python images/grafana/source [directory]`.

Grafana loads the JSON files in images/grafana/dashboards, which are committed.
"""

import json
import sys
from pathlib import Path

import gpu_memory
import jobs
import overview

import inference
import training

DASHBOARDS = Path(__file__).parent.parent / "dashboards"
SOURCES = {
    "overview": overview,
    "gpu-memory": gpu_memory,
    "training": training,
    "inference": inference,
    "jobs": jobs,
}

if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DASHBOARDS
    for name, source in SOURCES.items():
        (directory / f"{name}.json").write_text(json.dumps(source.build(), indent=2) + "\n")
