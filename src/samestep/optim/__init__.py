"""Schedules counted in applied updates, and what an optimizer needs to see."""
