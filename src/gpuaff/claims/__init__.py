"""Claiming GPUs: looking, choosing, leasing, waiting and occupying."""
