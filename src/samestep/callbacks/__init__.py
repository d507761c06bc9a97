"""What may look on while a run goes on, and ask for things: never change them."""
