"""Lines of logs that are known, with their cause and what to do."""
