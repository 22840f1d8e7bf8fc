"""Write the dashboards: `python images/grafana/source`. The JSON beside it is what Grafana loads, and is committed."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_memory
import jobs
import overview
import training

import inference

DASHBOARDS = Path(__file__).parent.parent / "dashboards"
SOURCES = {"overview": overview, "gpu-memory": gpu_memory, "training": training, "inference": inference, "jobs": jobs}


def files() -> dict[str, str]:
    """File name -> content."""
    return {f"{name}.json": json.dumps(source.build(), indent=2) + "\n" for name, source in SOURCES.items()}


if __name__ == "__main__":
    for name, content in files().items():
        (DASHBOARDS / name).write_text(content)
