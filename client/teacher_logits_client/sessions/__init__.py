"""Sessions: the handshake that opens one, what keeps it alive, and how its leases are opened."""
