"""Optimizers that update all parameters of one device and dtype in a single launch."""
