"""What is trained: one file a task."""
