"""See fake_program."""

from fake_program import main

main("a")
