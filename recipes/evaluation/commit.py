"""The commit of this project that a result was made with."""

import subprocess
from pathlib import Path


def project_commit() -> str | None:
    """Short hash, with + where tracked files had changes; None outside a clone or without git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
