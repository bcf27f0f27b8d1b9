"""Who may write into a run directory: one job at a time, on one host or on many."""
