"""Vision towers, one file per family; `layers.py` has what they share."""
