"""Checks of one node, before ranks start on it."""
