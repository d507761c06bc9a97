"""Other programs that a run is shown in; each is an optional extra and no part of the training."""
