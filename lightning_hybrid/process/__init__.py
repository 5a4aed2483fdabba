"""Processes start, find each other, are watched, and end."""
