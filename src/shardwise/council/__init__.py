"""Where sites that are jobs of their own agree on who takes part in an outer step. No torch."""
