"""Hardware, links and model shapes as data."""
