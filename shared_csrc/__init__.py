"""Kernel headers and the code that compiles and loads them, vendored into every Apex wheel."""
