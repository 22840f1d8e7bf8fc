"""Sizes of the parallel dimensions, and each rank's place in them. It imports no torch and depends
on no model."""
