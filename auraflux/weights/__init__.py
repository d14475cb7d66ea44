"""Checkpoints as they lie on disk, and how a model takes its weights from them."""
