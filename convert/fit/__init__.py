"""Fit mixers in closed form to the attention that they replace, one block of the teacher at a time."""
