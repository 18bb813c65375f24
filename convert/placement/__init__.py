"""What each layer of the hybrid holds: attention, a mixer, or both, and what that costs in cache."""
