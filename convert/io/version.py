"""Version of this project, which a conversion records."""

import functools
import hashlib
import importlib.metadata
from pathlib import Path

PACKAGES = ("convert", "modeling_llamba", "modeling_phimamba")
SOURCES = (".py", ".c", ".h")


def project_version() -> str:
    """Return the installed version and a hash of the sources, which differ between commits of one version."""
    try:
        version = importlib.metadata.version("convert-to-hybrid")
    except importlib.metadata.PackageNotFoundError:
        version = "0"  # run from its folder without being installed
    return f"{version}+{_hash_of_sources()}"


@functools.cache
def _hash_of_sources() -> str:
    """First digits of a hash over all code that decides what a conversion gives."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.*")):
        if path.suffix in SOURCES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
