"""The demo: a real teacher, a student that learns from it, and what came of it."""
