"""Tests of whole stacks. The tests are a package, so that the package's stacks end after the
package's last test in a worker. An idle stack would take CPU time from the tests after it."""
