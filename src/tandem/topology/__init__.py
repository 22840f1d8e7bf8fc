"""Sizes of the parallel dimensions, and each rank's place in them. The package imports no torch and
depends on no model."""
