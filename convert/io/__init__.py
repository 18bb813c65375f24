"""Read a teacher's checkpoint, map its tensors to the hybrid's, write them as shards, and own the output folder."""
