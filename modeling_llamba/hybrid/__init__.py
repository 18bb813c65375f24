"""A hybrid layer: its equations, the layout of a pass in blocks, eviction, rounding, the cache."""
