"""Gates: one module for each foreign thing. They report what is, and decide nothing."""
