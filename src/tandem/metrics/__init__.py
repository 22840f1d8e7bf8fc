"""All metrics of Tandem (vLLM's server exports its own), the exporter, and the exporter's
collectors, with one file for each source of metrics.

Ranks write their numbers into their heartbeat files, and the exporter reads these files. So ranks
need no HTTP server, and the exporter also works after the ranks have ended. Prometheus scrapes four
jobs: `tandem-controller`, `tandem-trainer`, `tandem-inference`, and vLLM itself as `tandem-vllm`.
The inference exporter publishes the address of each vLLM for Prometheus at `/targets`. The scrape
configuration for compose sets the labels `namespace`, `pod` and `role`, as Kubernetes does in a
cluster. Rules and dashboards join on (namespace, pod) and on a GPU's UUID, so compose and the chart
use the same files. In `images/prometheus/rules/`, `tandem.yml` has the rules for every deployment,
and `kubernetes.yml` has the rules for a cluster. `images/grafana/source` makes the dashboards.

Ranks exit after each job. So a rank's series come and go, and a missing series is not a fault. A
memory leak is visible as GPU memory in use while no job runs. `tests/monitoring` runs healthy and
broken stacks through promtool and states which alerts fire at each minute.
"""
