"""The operators of group normalization and the kernels behind them."""
