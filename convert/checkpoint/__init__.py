"""The folder a conversion writes: put in place whole, with its card, and read again."""
