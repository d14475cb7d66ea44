"""Checkpoint readers, converters and the loader that hands a model its weights."""
