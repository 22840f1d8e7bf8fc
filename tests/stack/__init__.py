"""Tests of whole stacks. A package, so that its stacks end with its last test in a worker: an idle
stack takes CPU time from the tests after it."""
