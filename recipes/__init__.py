"""Train, measure and use a hybrid."""
