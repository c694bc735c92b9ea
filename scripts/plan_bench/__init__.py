"""Benchmark of predictions: simulated step times beside real ones, and beside published ones."""
