"""Tiny checkpoints, each written the way its own framework writes it."""
