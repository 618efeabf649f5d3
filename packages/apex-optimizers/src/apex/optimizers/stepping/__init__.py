"""One step of an optimizer: which parameters one launch updates, and what is kept of them."""
