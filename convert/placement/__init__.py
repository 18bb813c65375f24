"""Placement: attention, a mixer or both in each layer of the hybrid, and its cost in cache."""
