"""Training end to end against a teacher: the loss, TRL's trainer with it, and the teacher's figures on disk."""
