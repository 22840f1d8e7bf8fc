"""All metrics of Tandem, and the exporter with its collectors. Each source of metrics has a file of
its own. The vLLM server exports its own metrics.

Ranks write their measurements into heartbeat files, and the exporter reads these files. So ranks
need no HTTP server, and the exporter also works after the ranks have ended. Prometheus has the four
scrape jobs `tandem-controller`, `tandem-trainer`, `tandem-inference` and `tandem-vllm`. The job
`tandem-vllm` scrapes vLLM itself. The inference exporter publishes the address of each vLLM for
Prometheus at `/targets`. The scrape configuration for Docker Compose sets the labels `namespace`,
`pod` and `role`, as Kubernetes does in a cluster. Rules and dashboards join series by the labels
`namespace` and `pod`, or by a GPU's UUID. Docker Compose and the Helm chart therefore use the same
files of rules and dashboards. `images/prometheus/rules/tandem.yml` has the rules for every
deployment, and `images/prometheus/rules/kubernetes.yml` has the rules for a cluster.
`images/grafana/source` makes the dashboards.

The collector in `jobs.py` reads the events of jobs. The collector in `ranks.py` reads the state of
running attempts. The age of a heartbeat or request is measured by the exporter's own clock, because
a rank's clock may be wrong.

A rank's series exist only while a job runs, so a missing series of a rank is not a fault. A memory
leak is visible as GPU memory in use while no rank runs. `tests/monitoring` gives promtool the
metrics of healthy and broken deployments, and states which alerts must fire at each minute.
"""
