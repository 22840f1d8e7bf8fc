"""vLLM's HTTP interface as Tandem uses it. The package handles every difference between vLLM's
versions."""
