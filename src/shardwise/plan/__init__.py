"""Decisions with reasons: the Plan, what it will need, and how it is chosen."""
