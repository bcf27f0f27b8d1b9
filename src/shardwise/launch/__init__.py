"""From a config to running ranks."""
