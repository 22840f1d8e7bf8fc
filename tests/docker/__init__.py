"""Tests on a real Docker Engine. A package, so that the containers end with its last test in a
worker: an idle stack and its health checks take a sixth of a core."""
