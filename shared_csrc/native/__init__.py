"""How kernels are compiled against ``include/``, found again, and loaded."""
