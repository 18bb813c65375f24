"""What carries the training recipes: arguments, data, the run around a trainer, checkpoints."""
