"""A fake NVIDIA driver, so that the real nvidia-ml-py runs where there is no GPU."""
