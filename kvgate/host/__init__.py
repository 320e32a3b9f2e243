"""The machine: devices, memory, file systems, ports and folders."""
