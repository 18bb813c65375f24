"""The three stages of MOHAWK (Bick et al. 2024)."""
