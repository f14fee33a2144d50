"""The version, in one place; setup.py reads it as text, so keep it a plain assignment."""

__version__ = "0.6.3+hybrid.1"
__version_tuple__ = (0, 6, 3, "hybrid", 1)
