"""Weights: read a teacher's checkpoint, map its tensors to the hybrid's, write shards."""
