"""Tests of other projects' clients. A package, so that the stack ends with its last test in a
worker."""
