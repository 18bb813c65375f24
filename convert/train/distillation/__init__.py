"""Training end to end against a teacher: the loss, and TRL's trainer with it."""
