"""Checkpoints: one safetensors file per rank, one manifest written last, published by one rename.

Import the parts you need: ``manifest``, ``storage``, ``catalog`` and ``verify`` do not import torch.
"""
