"""Base classes of tests that run on several processes."""
