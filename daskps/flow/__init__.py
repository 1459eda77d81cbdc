"""The stages and the run that composes them."""
