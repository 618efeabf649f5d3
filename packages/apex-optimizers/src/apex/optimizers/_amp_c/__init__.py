"""The functions of the legacy module amp_C, a file per kind of kernel."""
