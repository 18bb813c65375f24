"""Quality of a hybrid beside its teacher: likelihood, recall, generation, tasks, speed."""
