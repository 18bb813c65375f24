"""How near structured matrices come to a teacher's attention matrices."""
