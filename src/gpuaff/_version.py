"""The version, in one place: hatchling reads it here, the package on first use."""

__version__ = "0.1.0"
