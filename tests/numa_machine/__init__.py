"""A machine with two sockets, emulated: the kernel's own NUMA nodes, cpusets and CPU hotplug."""
