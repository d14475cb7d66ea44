"""Weights sharded over ranks: tensor slices, expert placement, expert parallelism."""
