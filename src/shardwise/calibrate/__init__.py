"""Measure what this machine's devices and links do, for plans to use instead of the catalogue."""
