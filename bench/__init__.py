"""Benchmarks' results, notebook and instruments; none of it is part of the wheel."""
