"""Observe: what a machine has, as one immutable value."""
