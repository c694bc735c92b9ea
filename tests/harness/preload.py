"""Imported by the fork server, once: what every rank would otherwise import for itself.

The last line makes all of it permanent. A collection in a forked rank would otherwise write to every object's header,
and so copy all of its pages.
"""

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that there is no numpy
    import pytest  # noqa: F401
    import torch
    import torch._dynamo
    import torch._functorch.aot_autograd
    import torch.distributed.device_mesh
    import torch.optim.swa_utils
    import torch.utils.checkpoint  # noqa: F401

try:
    import fsdplite

    for name in fsdplite.__all__:
        getattr(fsdplite, name)  # names are loaded when they are first used
except Exception:  # the ranks will say it with a traceback
    pass

gc.collect()
gc.freeze()
