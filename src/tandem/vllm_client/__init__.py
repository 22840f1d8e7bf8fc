"""vLLM's HTTP as Tandem uses it, and every difference between vLLM's versions."""
