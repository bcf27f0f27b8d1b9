"""A page over runs, served to this machine's browser while they go on."""
