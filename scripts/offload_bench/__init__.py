"""The benchmark of `scripts/bench.py offload`."""
