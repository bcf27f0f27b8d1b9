"""One self-contained HTML page from what runs have left: plan, events, checkpoints."""
