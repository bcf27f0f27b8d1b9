"""Whether a run met its gates, and whether two runs are the same."""
