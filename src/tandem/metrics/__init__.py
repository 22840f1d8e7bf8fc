"""Every metric except the metrics of vLLM's server; the exporter and its collectors, one file per
source.

Ranks write their numbers into their heartbeat files, and the exporter reads these files. So ranks
serve no HTTP, and the exporter outlives them. Prometheus scrapes four jobs: `tandem-controller`,
`tandem-trainer`, `tandem-inference`, and vLLM itself as `tandem-vllm`. The inference exporter
publishes the address of each vLLM for Prometheus at `/targets`. The scrape configuration for
compose sets the labels `namespace`, `pod` and `role`, which Kubernetes would set. Rules and
dashboards join on (namespace, pod) and on a GPU's UUID, so compose and the chart use the same
files. In `images/prometheus/rules/`, `tandem.yml` has the rules for every deployment, and
`kubernetes.yml` has the rules for a cluster. `images/grafana/source` makes the dashboards.

Ranks exit after each job. So a rank's series come and go, and a missing series is not a fault. A
leak shows as memory in use while no job runs. `tests/monitoring` runs healthy and broken stacks
through promtool and states which alerts fire at each minute.
"""
