"""Read a teacher's checkpoint, map its tensors to the hybrid's, and write them as shards."""
