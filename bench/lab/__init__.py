"""Instruments that look inside kernels and steps: `python -m bench.lab.cycles`, `python -m bench.lab.overhead`."""
