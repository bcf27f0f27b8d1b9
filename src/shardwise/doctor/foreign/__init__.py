"""Checks of other tools' configurations and of scripts, which are read and never run."""
