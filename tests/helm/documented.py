"""helm/source/values.py, which reads values.yaml with its comments."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from typing import Any

from helm.charts import CHART

SOURCE = CHART.parent / "source"


@cache
def values() -> list[Any]:
    """Every key of values.yaml, with its comment."""
    spec = importlib.util.spec_from_file_location("tandem_helm_values", SOURCE / "values.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.read((CHART / "values.yaml").read_text())
