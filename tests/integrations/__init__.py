"""Tests of other projects' clients. The tests are a package, so that the package's stack ends after
the package's last test in a pytest worker."""
