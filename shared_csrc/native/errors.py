"""The one error that building and loading kernels raises."""


class BuildError(RuntimeError):
    """A kernel library is missing, cannot be built here, or cannot be loaded.

    The message names the package, the op and the device, gives the reason and says what to do.
    """
