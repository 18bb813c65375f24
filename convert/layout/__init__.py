"""Layers of a hybrid: what each holds, what the user may call them, and the bytes of cache that they take."""
