"""The outside world: one file per foreign thing, and nobody else touches it."""
