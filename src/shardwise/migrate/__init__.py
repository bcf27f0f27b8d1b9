"""Configurations of other tools become ours, and ours an Accelerate file. Text in, text out."""
