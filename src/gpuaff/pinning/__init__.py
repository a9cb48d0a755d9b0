"""Act: put this process on its CPUs, and undo it."""
