"""Files for the platforms that run jobs, and the platforms' own clients. Imports no torch."""
