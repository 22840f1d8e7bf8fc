"""Every metric except those of vLLM's server; the exporter and its collectors, a file for each
source.

Ranks write their numbers into their heartbeat files, and the exporter reads these files. So ranks
serve no HTTP, and the exporter outlives them. Prometheus scrapes four jobs: `tandem-controller`,
`tandem-trainer`, `tandem-inference`, and vLLM itself as `tandem-vllm`. The inference exporter tells
Prometheus at `/targets` where each vLLM is. The scrape configuration sets the labels `namespace`,
`pod` and `role` under compose as Kubernetes would. Rules and dashboards join on (namespace, pod)
and on a GPU's UUID, so compose and the chart use the same files. In `images/prometheus/rules/`,
`tandem.yml` has the rules for every deployment and `kubernetes.yml` those for a cluster.
`images/grafana/source` makes the dashboards.

Ranks exit after each job. So a rank's series come and go, and a missing series is not a fault. A
leak is memory in use while no job runs. `tests/monitoring` plays healthy and broken stacks through
promtool and states which alerts fire at each minute.
"""
