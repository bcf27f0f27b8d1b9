"""Rank 0 of N on one device or on none: the real training code, emulated collectives."""
