"""The start of the command: makes sure that the packages of these general names are this project's, and runs it."""

import importlib.util
import sys
from pathlib import Path

SIGNS = {
    "convert": "pipeline.py",
    "modeling_llamba": "ship_code.py",
    "modeling_phimamba": "modeling_phimamba.py",
    "recipes": "compare.py",
}
"""Packages, and a file that only this project's have."""


def main() -> None:
    """Entry point of the console script."""
    if sys.platform == "win32":
        sys.exit("error: convert-to-hybrid runs on Linux and macOS; on Windows, install it in WSL.")
    for name, sign in SIGNS.items():
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else spec.submodule_search_locations or [str(spec.origin)]
        if not any(Path(place, sign).is_file() for place in places):
            sys.exit(
                f"error: {', '.join(places) or 'nothing'} stands where this project's package {name} should; install "
                "it apart from others: pipx install, uv tool install, or a virtual environment of its own."
            )
    try:
        from recipes.cli import main as run

        run()
    except KeyboardInterrupt:  # before the command could say so itself
        sys.stderr.write("error: interrupted; nothing was done.\n")
        sys.exit(130)
