"""Observe: what the launcher says about this process."""
