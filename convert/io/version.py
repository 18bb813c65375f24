"""Version of this project, which a conversion records."""

import importlib.metadata


def project_version() -> str:
    """Return the installed version, or "checkout" where the project runs from its folder without being installed."""
    try:
        return importlib.metadata.version("convert-to-hybrid")
    except importlib.metadata.PackageNotFoundError:
        return "checkout"
