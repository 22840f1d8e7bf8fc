"""Tests of whole stacks. The tests are a package, so that the package's stacks end after the
package's last test in a pytest worker. A stack that stays would take CPU time from later tests."""
