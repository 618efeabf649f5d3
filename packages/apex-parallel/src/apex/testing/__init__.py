"""Switches and decorators of tests, where ROCm's Apex has them."""
