"""Tests of whole stacks. They are a package, so that the package's stacks end with its last test in
a worker. An idle stack would take CPU time from the tests after it."""
