"""Checkpoints of an earlier format."""

from pathlib import Path

BEFORE = Path(__file__).parents[1] / "fixtures" / "checkpoints_b04284e.tar.xz"
"""A hybrid of each family in format 1 as `save_pretrained` wrote it at commit b04284e, with its own code (other files
than today), and ids and logits in expected.pt."""
