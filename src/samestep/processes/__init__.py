"""Who is alive: start ranks on this machine, watch them, and end them together."""
