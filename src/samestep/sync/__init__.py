"""How the gradients of one global batch become one sum."""
