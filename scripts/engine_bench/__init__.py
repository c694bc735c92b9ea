"""What `scripts/bench.py engine` is made of: models, contenders, clocks, a counter of live bytes, tables."""
