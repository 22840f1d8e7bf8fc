"""All metrics of Tandem, the exporter, and the exporter's collectors, with one file for each source
of metrics. vLLM's server exports its own metrics.

Ranks write their numbers into their heartbeat files, and the exporter reads these files. So ranks
need no HTTP server, and the exporter also works after the ranks have ended. Prometheus scrapes four
jobs: `tandem-controller`, `tandem-trainer`, `tandem-inference`, and vLLM itself as `tandem-vllm`.
The inference exporter publishes the address of each vLLM for Prometheus at `/targets`. The scrape
configuration for Docker Compose sets the labels `namespace`, `pod` and `role`, as Kubernetes does
in a cluster. Rules and dashboards join on (namespace, pod) and on a GPU's UUID, so Docker Compose
and the Helm chart use the same files. `images/prometheus/rules/tandem.yml` has the rules for every
deployment, and `images/prometheus/rules/kubernetes.yml` has the rules for a cluster.
`images/grafana/source` makes the dashboards.

The collector in `jobs.py` reads the events of jobs. The collector in `ranks.py` reads the state of
running attempts. The age of a heartbeat or request is measured by the exporter's own clock, because
a rank's clock may be wrong.

The series of ranks exist only while a job runs, so a missing series is not a fault. A memory leak
is visible as GPU memory in use while no rank runs. `tests/monitoring` runs the metrics of healthy
and broken deployments through promtool, and states which alerts fire at each minute.
"""
