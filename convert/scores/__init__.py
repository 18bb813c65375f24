"""Placements that scores decide within a cache budget."""
