"""What carries the training recipes: data, loss, trainer, checkpoints."""
