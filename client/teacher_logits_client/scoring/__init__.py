"""Scoring: from rows to a request, and from its answer to a payload."""
