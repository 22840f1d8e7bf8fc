"""Sizes of the parallel dimensions, and each rank's place in them; knows no model and no torch."""
