"""Tests of other projects' clients. These tests are a package, so that the stack ends with the
package's last test in a worker."""
