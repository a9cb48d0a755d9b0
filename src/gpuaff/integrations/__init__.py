"""gpuaff inside other libraries, one module each. They are imported by what they are for."""
