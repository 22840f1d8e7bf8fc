"""Tinker's API, for programs that speak to it by its own package."""
