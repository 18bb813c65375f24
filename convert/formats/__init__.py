"""Read the formats in which others published hybrids, and write transformers' own architectures."""
