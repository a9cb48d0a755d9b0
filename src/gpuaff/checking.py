"""Look: is a process still where it was put, who moved it, and how to get it back."""
