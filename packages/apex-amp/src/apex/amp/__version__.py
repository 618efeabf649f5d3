"""The version of amp's interface, as Apex has always reported it; the wheel has its own version."""

VERSION = (0, 1, 0)
"""Major, minor and patch version of amp's interface."""
__version__ = ".".join(map(str, VERSION))
