"""Proves on a user's own config that all layouts compute the same."""
