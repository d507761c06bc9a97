"""One step, and the session around it."""
