"""vLLM's HTTP interface as Tandem uses it. Every difference between vLLM's versions is handled
here."""
