"""States on the disk."""
