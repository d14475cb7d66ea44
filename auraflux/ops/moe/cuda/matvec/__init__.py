"""Experts for one or a few tokens on CUDA."""
