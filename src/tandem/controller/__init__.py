"""The HTTP API: it checks what comes in, writes it to the spool, and tells what the spool says. No GPU, no torch."""
