"""How good a hybrid is beside its teacher: likelihood, recall, generation, tasks, speed."""
