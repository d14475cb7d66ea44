"""Experts for many tokens on CUDA: grouped GEMMs and a persistent kernel."""
