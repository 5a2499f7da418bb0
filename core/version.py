"""The version that manifests and `throughline --version` state."""

from importlib import metadata


def version() -> str:
    """The installed version, or "0+source" when run from a checkout that was never installed."""
    try:
        return metadata.version("throughline")
    except metadata.PackageNotFoundError:
        return "0+source"
