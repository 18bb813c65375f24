"""How well structured matrices approximate a teacher's attention matrices."""
