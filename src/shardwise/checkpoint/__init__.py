"""Save and restore sharded state."""
