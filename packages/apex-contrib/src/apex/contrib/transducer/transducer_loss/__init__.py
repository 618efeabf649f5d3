"""The operators of the loss of transducers, and their formula."""
