"""Mixers with a state for all tokens: Mamba-1, Mamba-2 and its discrete form."""
