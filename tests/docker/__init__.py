"""Tests on a real Docker Engine. These tests are a package, so that the containers end with the
package's last test in a worker. An idle stack and its health checks take a sixth of a core."""
