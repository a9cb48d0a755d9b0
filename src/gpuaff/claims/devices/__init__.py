"""Which GPUs are free, and which of them to take."""
