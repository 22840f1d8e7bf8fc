"""The HTTP API: it validates requests, writes them to the spool, and reports the spool's state. No
GPU, no torch."""
