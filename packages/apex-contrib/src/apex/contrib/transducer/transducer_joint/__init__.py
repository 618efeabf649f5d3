"""The operators of the joint of transducers, and their formula."""
