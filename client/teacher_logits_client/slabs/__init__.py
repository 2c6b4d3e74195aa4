"""Slabs of a publisher's own: made, filled by one writer, and free again when no one reads."""
