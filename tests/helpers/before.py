"""Checkpoints of earlier commits, each with its own code and with ids, logits and tokens in expected.pt."""

from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures"
BEFORE = FIXTURES / "checkpoints_b04284e.tar.xz"
"""A hybrid of each family in format 1, as `save_pretrained` wrote it."""
BEFORE_5_24 = FIXTURES / "checkpoints_0e8b8d9.tar.xz"
"""A hybrid of each family in format 2, as a conversion wrote it, and a fitted one in 8 bits with kept heads. Their
`generate` fails since transformers 5.24. The last eight positions have logits."""
