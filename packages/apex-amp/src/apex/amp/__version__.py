"""The version of amp's interface, as Apex has always reported it; the wheel has its own version."""

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))
