"""What must not move: the ordered sum, seeds, fingerprints, and which operations are safe."""
