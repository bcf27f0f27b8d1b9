"""Checks of what a run has left: its record, its plan and its logs."""
