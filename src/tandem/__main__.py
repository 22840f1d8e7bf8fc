"""`python -m tandem`: the command line."""

from tandem.cli import main

main()
