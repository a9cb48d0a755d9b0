"""As much of pycuda as a placeholder uses."""
