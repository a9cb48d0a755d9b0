"""Leases, the guard, the registry and the queue."""
