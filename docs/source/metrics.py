"""`python -m docs.source.metrics` makes the tables of docs/metrics.md from the catalogue of
metrics."""

from collections.abc import Iterable
from pathlib import Path

from images.grafana.vllm_metrics import VLLM_METRICS

from tandem.metrics.catalogue import CATALOGUE
from tandem.metrics.metric import Metric

DOCUMENT = Path(__file__).parents[1] / "metrics.md"
# The empty lines end the HTML comments: some Markdown renderers read HTML up to an empty line.
BEGIN = "<!-- made from the catalogue: begin -->\n\n"
END = "\n<!-- made from the catalogue: end -->\n"


def with_new_tables(text: str) -> str:
    """The text of docs/metrics.md, with new tables between BEGIN and END."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    vllm = (
        "## vLLM's server\n\nThe table lists the metrics of the job `tandem-vllm` that dashboards"
        " and rules use. vLLM 0.32 and Tandem's plugin in vLLM export these metrics.\n\n"
    )
    return f"{before}{BEGIN}{_table(CATALOGUE)}\n{vllm}{_table(VLLM_METRICS)}{END}{after}"


def _table(metrics: Iterable[Metric]) -> str:
    head = "| name | type | labels | what it says | from | exporters |\n|---|---|---|---|---|---|\n"
    return head + "".join(_row(metric) for metric in metrics)


def _row(metric: Metric) -> str:
    labels = []
    for name, values in metric.labels.items():
        known = (
            ""
            if not values or name in ("phase", "error", "collector")
            else f" ({', '.join(values)})"
        )
        labels.append(f"`{name}`{known}")
    exporters = ", ".join(metric.exporters) or "vLLM"
    source = metric.source.replace("<", "&lt;")
    return (
        f"| `{metric.name}` | {metric.kind} | {', '.join(labels)} | {metric.help} | {source} |"
        f" {exporters} |\n"
    )


if __name__ == "__main__":
    DOCUMENT.write_text(with_new_tables(DOCUMENT.read_text()))
