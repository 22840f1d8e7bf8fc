"""vLLM's HTTP interface as Tandem uses it; every difference between vLLM's versions is here."""
