"""Checkpoints beside plain writes and torch.distributed.checkpoint: time, bytes and memory. Run by ``bench.py``."""
