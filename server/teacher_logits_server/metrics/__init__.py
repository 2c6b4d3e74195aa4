"""What a server counts and shows to Prometheus.

names         every metric there is: name, kind, labels, help
instruments   the registry of one server, and what its parts count in
refusals      calls that were refused, by surface and reason
held          what the tables hold, read off them at a scrape
page          what Prometheus scrapes
"""
