"""Benchmarks of ops, models and servers, compared with other libraries and with the machine's measured peak."""
