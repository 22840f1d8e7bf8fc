"""Tests on a real Docker Engine. They are a package, so that the containers end with the package's
last test in a worker. An idle stack and its health checks take a sixth of a core."""
