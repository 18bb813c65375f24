"""The commit of this project that a result was made with."""

import subprocess
from pathlib import Path


def project_commit() -> str | None:
    """Short hash, with + where the tree had changes; None outside a clone."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    found = []
    for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
        found.append(done.stdout.strip())
    return found[0] + ("+" if found[1] else "")
