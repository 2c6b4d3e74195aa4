"""What a server counts and shows to Prometheus: its names, who counts them, and how they are read.

names       every metric there is: name, kind, labels, help
instruments the registry of one server, and all that counts in it
refusals    calls that were refused, by surface and reason
samples     what a registry counts, for whoever inspects
"""
