"""The op library of this wheel: every op of the package is defined through it."""

from ._shared.native.library import OpLibrary

library = OpLibrary("apex_contrib", __file__)
