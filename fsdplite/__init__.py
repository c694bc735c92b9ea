"""fsdplite: fully sharded data parallel training for PyTorch, built around a flat parameter per unit."""

__version__ = "0.1.0"
