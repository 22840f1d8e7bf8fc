"""The catalogue as docs/metrics.md has it: `python -m tandem.metrics.document docs/metrics.md` brings it up to date."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tandem.metrics.catalogue import CATALOGUE
from tandem.metrics.metric import Metric
from tandem.metrics.vllm import VLLM_METRICS

BEGIN, END = "<!-- made from the catalogue: begin -->\n", "<!-- made from the catalogue: end -->\n"


def tables() -> str:
    """Markdown: our own metrics, then vLLM's."""
    return (
        f"{_table(CATALOGUE)}\n"
        "## vLLM's own\n\n"
        "What vLLM 0.32 exports under the job `tandem-vllm`, as far as dashboards and rules use it.\n\n"
        f"{_table(VLLM_METRICS)}"
    )


def _table(metrics: Iterable[Metric]) -> str:
    head = "| name | type | labels | what it says | from | exporters |\n|---|---|---|---|---|---|\n"
    return head + "".join(_row(metric) for metric in metrics)


def _row(metric: Metric) -> str:
    labels = []
    for name, values in metric.labels.items():
        known = "" if not values or name in ("phase", "error", "collector") else f" ({', '.join(values)})"
        labels.append(f"`{name}`{known}")
    who = ", ".join(metric.exporters) or "vLLM"
    source = metric.source.replace("<", "&lt;")
    return f"| `{metric.name}` | {metric.kind} | {', '.join(labels)} | {metric.help} | {source} | {who} |\n"


def updated(text: str) -> str:
    """`text` with what stands between the two marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{tables()}{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text()))
