"""Moving bytes between the ranks of one generation."""
