"""Fused kernels that few models need: each subpackage stands alone and is imported by itself."""
