"""Common parts of the training recipes: arguments, data, the run around a trainer, checkpoints."""
