"""Leases, the lock directory with the guard and the registry, and the queue."""
