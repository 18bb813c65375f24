"""Files of a hybrid beside its weights: card, code, tokenizer; and how a checkpoint is read again."""
