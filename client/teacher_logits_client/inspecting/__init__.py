"""``inspect``: a server's view for people and programs, and the operator's reclaim."""
