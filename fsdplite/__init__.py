"""fsdplite: fully sharded data parallel training for PyTorch, built around a flat parameter per unit.

``import fsdplite as fsdp``. Names are loaded when they are first used, so that the command line can start without
importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .checkpoint.catalog import latest_step as latest_step
    from .checkpoint.catalog import list_checkpoints as list_checkpoints
    from .checkpoint.export import export_safetensors as export_safetensors
    from .checkpoint.load import load_checkpoint as load_checkpoint
    from .checkpoint.load_files import load_safetensors as load_safetensors
    from .checkpoint.save import save_checkpoint as save_checkpoint
    from .checkpoint.verify import verify_checkpoint as verify_checkpoint
    from .errors import CheckpointError as CheckpointError
    from .errors import FSDPError as FSDPError
    from .fsdp_unit import FSDPUnit as FSDPUnit
    from .full import full_grad as full_grad
    from .full import full_params as full_params
    from .full import full_state_dict as full_state_dict
    from .groups import init_distributed as init_distributed
    from .inspect import trace as trace
    from .planning.automatic import auto as auto
    from .planning.prediction import plan as plan
    from .planning.simulation import simulate as simulate
    from .planning.topology import Link as Link
    from .planning.topology import Topology as Topology
    from .offload.optimizer import offloaded as offloaded
    from .offload.options import Offload as Offload
    from .policy import by_class as by_class
    from .policy import by_name as by_name
    from .policy import by_predicate as by_predicate
    from .policy import by_size as by_size
    from .policy import from_model as from_model
    from .precision import Precision as Precision
    from .recompute.budget import recompute_within as recompute_within
    from .scaler import LossScaler as LossScaler
    from .table import summary as summary
    from .update import mark_updated as mark_updated
    from .wrap import fsdp_wrap as fsdp_wrap

_HOMES = {
    "CheckpointError": "errors",
    "FSDPError": "errors",
    "FSDPUnit": "fsdp_unit",
    "Link": "planning.topology",
    "LossScaler": "scaler",
    "Offload": "offload.options",
    "Precision": "precision",
    "Topology": "planning.topology",
    "auto": "planning.automatic",
    "by_class": "policy",
    "by_name": "policy",
    "by_predicate": "policy",
    "by_size": "policy",
    "from_model": "policy",
    "export_safetensors": "checkpoint.export",
    "fsdp_wrap": "wrap",
    "full_grad": "full",
    "full_params": "full",
    "full_state_dict": "full",
    "init_distributed": "groups",
    "latest_step": "checkpoint.catalog",
    "list_checkpoints": "checkpoint.catalog",
    "load_checkpoint": "checkpoint.load",
    "load_safetensors": "checkpoint.load_files",
    "mark_updated": "update",
    "offloaded": "offload.optimizer",
    "plan": "planning.prediction",
    "recompute_within": "recompute.budget",
    "save_checkpoint": "checkpoint.save",
    "simulate": "planning.simulation",
    "summary": "table",
    "trace": "inspect",
    "verify_checkpoint": "checkpoint.verify",
}

__all__ = sorted(_HOMES) + ["__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        from .errors import did_you_mean

        raise AttributeError(f"module 'fsdplite' has no attribute {name!r}" + did_you_mean(name, _HOMES))
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
