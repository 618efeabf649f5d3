"""The operators of fast_layer_norm, and their formula."""
