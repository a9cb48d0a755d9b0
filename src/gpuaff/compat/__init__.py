"""The old names: libraries that gpuaff takes the place of, one module each."""
