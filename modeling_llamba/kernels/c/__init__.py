"""Functions in C for a CPU: their source, their library, and the backend that calls them."""
