"""The hybrid that is written: its classes, the shapes of its tensors, and the first weights of its mixers."""
