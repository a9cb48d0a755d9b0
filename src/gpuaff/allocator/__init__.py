"""Decide: from a topology to a plan. Pure: no I/O, no clock, no environment."""
