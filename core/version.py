"""The version that manifests and `throughline --version` state."""

from importlib import metadata


def version() -> str:
    """The installed version, or "0+source" when run from a checkout that was never installed."""
    try:
        return metadata.version("throughline")
    except metadata.PackageNotFoundError:
        return "0+source"


def programs(*packages: str) -> list[str]:
    """This program and the libraries that compute, each with its version: "torch 2.13.0"."""
    found = [f"throughline {version()}"]
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(package)
    return found
