"""Accelerate's configuration file, and the Trainer's ``fsdp_config``: their settings are arguments of plugins.

A section is read as the call of the plugin that is made of it, by the plugin's own rule.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace

from . import config_settings
from .finder import find
from .rule import CHANGE, DROP, NONE, Finding

__all__ = ["NAME", "findings", "is_config"]

NAME = "Accelerate config"

_OTHER_NAMES = {  # settings that are not called as the plugin's arguments are
    "offload_params": "cpu_offload",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "version": "fsdp_version",
    "deepspeed_config_file": "hf_ds_config",
}
_FSDP = frozenset(
    "sharding_strategy reshard_after_forward auto_wrap_policy backward_prefetch forward_prefetch cpu_offload "
    "fsdp_version transformer_cls_names_to_wrap cpu_ram_efficient_loading state_dict_type sync_module_states "
    "use_orig_params min_num_params activation_checkpointing limit_all_gathers xla xla_fsdp_v2 xla_fsdp_settings "
    "xla_fsdp_grad_ckpt".split()
)
_DEEPSPEED = frozenset(
    "zero_stage offload_optimizer_device offload_param_device gradient_clipping gradient_accumulation_steps "
    "zero3_init_flag zero3_save_16bit_model hf_ds_config deepspeed_hostfile deepspeed_multinode_launcher "
    "offload_optimizer_nvme_path offload_param_nvme_path".split()
)
_SECTIONS = {
    "fsdp_config": ("FullyShardedDataParallelPlugin", _FSDP), "deepspeed_config": ("DeepSpeedPlugin", _DEEPSPEED),
}  # fmt: skip
_MODEL_PARALLEL = ("megatron_lm_config", "tp_config", "parallelism_config")
_SIGNS = ("fsdp_config", "deepspeed_config", "distributed_type")
_WORDS = ("min_num_params", "transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap",
          "fsdp_min_num_params", "fsdp_sharding_strategy", "fsdp_version")  # fmt: skip
_REPLICATED = ("MULTI_GPU", "MULTI_CPU", "NO")
_LAUNCHED = "processes are started by torchrun: torchrun --nproc-per-node {processes} train.py"


def is_config(node: ast.Dict) -> bool:
    """Whether a dictionary is a file of Accelerate, or a ``fsdp_config`` by itself."""
    return bool(_keys(node).intersection((*_SIGNS, *_WORDS)))


def findings(node: ast.Dict) -> list[Finding]:
    """What becomes of the sections, and of how the run is started."""
    given = {key.value: (key, value) for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant)}
    found = []
    mixed = given.get("mixed_precision", (None, ast.Constant("no")))[1]
    if not _keys(node).intersection(_SIGNS):
        return _section("fsdp_config", node, node, mixed)
    for name, (key, value) in given.items():
        if isinstance(value, ast.Dict) and config_settings.is_config(value, alone=True):
            found += config_settings.findings(value)
        elif name in _SECTIONS and isinstance(value, ast.Dict):
            found += _section(name, key, value, mixed)
        elif name == "distributed_type" and isinstance(value, ast.Constant):
            found += _launch(key, value, given.get("num_processes", (None, ast.Name("N")))[1], mixed)
        elif name in _MODEL_PARALLEL and isinstance(value, ast.Dict) and value.keys:
            found.append(_finding(key, name, NONE, "", "it is model parallelism, or may be: there is none here"))
    return sorted(found, key=lambda finding: finding.line)


def _keys(node: ast.Dict) -> set[str]:
    return {key.value for key in node.keys if isinstance(key, ast.Constant)}


def _launch(key: ast.expr, value: ast.Constant, processes: ast.expr, mixed: ast.expr) -> Iterable[Finding]:
    note = _LAUNCHED.replace("{processes}", ast.unparse(processes))
    shown = f"distributed_type: {value.value}"
    if value.value in _REPLICATED or value.value is False:  # NO is False in YAML
        word = getattr(mixed, "value", "no")
        precision = f', precision="{word}"' if word in ("bf16", "fp16") else ""
        yield _finding(key, shown, CHANGE, f"fsdp.fsdp_wrap(model, stage=0{precision})", note)
    elif value.value in ("FSDP", "DEEPSPEED"):
        yield _finding(key, shown, DROP, "", note)
    else:
        yield _finding(key, shown, NONE, "", f"{value.value} is not known to this tool")


def _section(name: str, key: ast.expr, node: ast.Dict, mixed: ast.expr) -> list[Finding]:
    plugin, known = _SECTIONS[name]
    arguments, unknown = [], []
    for setting, value in zip(node.keys, node.values):
        if not isinstance(setting, ast.Constant):
            continue
        plain = str(setting.value).removeprefix("fsdp_")
        argument = _OTHER_NAMES.get(plain, plain)
        if argument in known:
            word = config_settings.literal(value)
            arguments.append(ast.keyword(argument, ast.Constant(word) if word in (True, False, None) else value))
        else:
            note = f"{setting.value} is not known to this tool: look in the guide"
            unknown.append(_finding(setting, f"{name}.{setting.value}: {ast.unparse(value)}", NONE, "", note))
    arguments.append(ast.keyword("mixed_precision", mixed))
    call = ast.copy_location(ast.Call(ast.Name(plugin, ast.Load()), [], arguments), key)
    tree = ast.fix_missing_locations(
        ast.Module([ast.ImportFrom("accelerate", [ast.alias(plugin)], 0), ast.copy_location(ast.Expr(call), key)], [])
    )
    shown = f"{name}: " + ", ".join(f"{setting}: {ast.unparse(value)}" for setting, value in _pairs(node))
    shown = shown if len(shown) <= 200 else shown[:197] + "..."
    return [replace(finding, engine=NAME, found=shown) for finding in find(tree)] + unknown


def _pairs(node: ast.Dict) -> list[tuple[str, ast.expr]]:
    return [(key.value, value) for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant)]


def _finding(key: ast.AST, shown: str, verdict: str, write: str, note: str) -> Finding:
    return Finding(key.lineno, key.col_offset + 1, NAME, shown[:200], verdict, write, (note,))
