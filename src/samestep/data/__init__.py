"""Which samples a step owns: arithmetic over sizes, settings and the seed, never a message between ranks."""
