"""Checks that need a plan and nothing else."""
