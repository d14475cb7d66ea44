"""Replay of kernel launches without Python: recorded decode steps, and plans of repeated op calls."""
