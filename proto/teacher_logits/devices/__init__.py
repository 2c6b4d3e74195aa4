"""Device memory as slabs: written by one process, opened by others, let go of in order."""
