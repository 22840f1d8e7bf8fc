"""Tests on a real Docker Engine. These tests are a package, so that a worker stops the containers
after the package's last test. An idle stack and its health checks take a sixth of a core."""
