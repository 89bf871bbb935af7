"""Benchmarks that ship with the package: ``kvloom bench``."""
