"""The experiments behind the catalogue; `python -m samestep.numerics.experiments` runs them again."""
