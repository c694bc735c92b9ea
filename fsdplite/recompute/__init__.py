"""Recomputation: activations that are dropped in forward and computed again in backward."""
