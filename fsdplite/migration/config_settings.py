"""DeepSpeed's configuration: a JSON file, or a dictionary in a script. Both are read as Python's syntax tree."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .rule import CHANGE, DROP, NONE, Finding

__all__ = ["NAME", "SETTINGS", "Setting", "findings", "is_config", "literal", "wrap_options", "written_out"]

NAME = "DeepSpeed config"
_SIGNS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
_OTHER_NAMES = {"bfloat16": "bf16"}
_WHOLE_SECTIONS = {"zero_optimization": "stage", "bf16": "enabled", "fp16": "enabled"}  # what a bare value says
_WORDS = {"true": True, "false": False, "null": None}
_UNKNOWN = object()


@dataclass(frozen=True)
class Setting:
    """What becomes of one setting.

    Attributes:
        write: The counterpart; ``{value}`` is the setting's value.
        verdict: As in rules.
        note: What to know.
        off: Values with which it asks for nothing.
        values: What to write for a value.
        none: Values that have no counterpart, and why.
        is_part: The counterpart of another setting holds it, and nothing is said of it.
    """

    write: str = ""
    verdict: str = CHANGE
    note: str = ""
    off: tuple[Any, ...] = (False, None)
    values: Mapping[Any, str] = field(default_factory=dict)
    none: Mapping[Any, str] = field(default_factory=dict)
    is_part: bool = False


_OPTIMIZERS = {
    "Adam": "torch.optim.AdamW", "AdamW": "torch.optim.AdamW",
    **{name: f"torch.optim.{name}" for name in ("SGD", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")},
}  # fmt: skip
_WHOLE = {
    name: "it reads whole tensors or compresses gradients: use an element-wise optimizer of torch.optim"
    for name in ("Lamb", "Muon", "OneBitAdam", "ZeroOneAdam", "OneBitLamb")
} | {"Lion": "torch.optim has none: use another element-wise optimizer"}
_HYBRID = 'mesh=init_device_mesh("cuda", (replicas, {value}), mesh_dim_names=("dp_replicate", "dp_shard"))'
_UNIT_WISE = "fsdplite moves whole units: their size is the policy's, and fsdp.auto chooses it from a cost model"

_STAGES = ("0", "1", "2", "3")

SETTINGS: dict[str, Setting] = {
    "zero_optimization.stage": Setting(values={stage: f"stage={stage}" for stage in _STAGES}, off=(None,)),
    "zero_optimization.offload_optimizer.device": Setting(
        values={
            "cpu": 'offload=fsdp.Offload(optimizer="cpu")',
            "nvme": 'offload=fsdp.Offload(optimizer="nvme", path="{path}")',
        },
        note="with an optimizer that fsdp.offloaded makes",
        off=("none", None),
    ),
    "zero_optimization.offload_param.device": Setting(
        values={"cpu": 'offload=fsdp.Offload(params="cpu")'},
        none={"nvme": "parameters rest in host memory at most; optimizer state may be in files"},
        off=("none", None),
    ),
    "zero_optimization.cpu_offload": Setting('offload=fsdp.Offload(optimizer="cpu")'),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Setting(
        "state = fsdp.full_state_dict(model, dtype=torch.bfloat16)"
    ),
    "zero_optimization.zero_hpz_partition_size": Setting(
        _HYBRID, note="a hybrid mesh: gathers stay inside it, and optimizer state is sharded inside it "
                      "too", off=(1, None)
    ),
    "zero_optimization.mics_shard_size": Setting(_HYBRID, off=(-1, 0, None)),
    **{
        f"zero_optimization.{name}": Setting(verdict=NONE, note="values on the wire are not quantized")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
                     "zeropp_loco_param")
    },
    **{
        f"zero_optimization.{name}": Setting(verdict=DROP, note=_UNIT_WISE, off=())
        for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "sub_group_size",
                     "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
                     "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold")
    },
    **{
        f"zero_optimization.{name}": Setting(verdict=DROP, note="always so, or without a meaning here", off=())
        for name in ("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions",
                     "round_robin_gradients", "load_from_fp32_weights", "ignore_unused_parameters",
                     "elastic_checkpoint", "use_multi_rank_bucket_allreduce", "memory_efficient_linear",
                     "override_module_apply",
                     "log_trace_cache_warnings", "enable_sanity_checks", "legacy_stage1", "cpu_offload_use_pin_memory",
                     "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential")
    },
    "zero_optimization.offload_optimizer.nvme_path": Setting(is_part=True),
    "zero_optimization.offload_optimizer": Setting(verdict=DROP, note="fsdp.Offload has pin, buffers, buffer_bytes"),
    "zero_optimization.offload_param": Setting(verdict=DROP, note="fsdp.Offload has pin"),
    "bf16.enabled": Setting('precision="bf16"', note="gradients are reduced in fp32"),
    "bf16": Setting(verdict=DROP, note="masters and reduction are fp32"),
    "fp16.enabled": Setting('precision="fp16"', note="with scaler = fsdp.LossScaler(), used as torch.amp.GradScaler "
                                                     "is"),
    "fp16.loss_scale": Setting(
        "scaler = fsdp.LossScaler(init_scale={value})", note="the scale goes on changing: there is no static "
                                                             "one", off=(0, None)
    ),
    "fp16.initial_scale_power": Setting("scaler = fsdp.LossScaler(init_scale=2.0**{value})", off=(None,)),
    "fp16.loss_scale_window": Setting("scaler = fsdp.LossScaler(growth_interval={value})", off=(None,)),
    "fp16": Setting(verdict=DROP, note="fsdp.LossScaler has no such setting"),
    "amp.enabled": Setting('precision="bf16"'),
    "amp": Setting(verdict=DROP),
    "gradient_clipping": Setting("model.clip_grad_norm_({value})", note="before optimizer.step()", off=(0, 0.0, None)),
    "gradient_accumulation_steps": Setting(
        "(loss / {value}).backward()",
        note="and optimizer.step() after every {value}th; `with model.no_sync():` around the others reduces only once",
        off=(1, None),
    ),
    "train_micro_batch_size_per_gpu": Setting(verdict=DROP, note="the data loader's batch_size", off=(None,)),
    "train_batch_size": Setting(
        verdict=DROP, note="ranks times the loader's batch_size times accumulation steps", off=(None,)
    ),
    "optimizer.type": Setting(
        values={name: f"optimizer = {{made:{there}}}" for name, there in _OPTIMIZERS.items()},
        none=_WHOLE,
        note="fused=True is torch's fastest; DeepSpeed's Adam is AdamW unless adam_w_mode is false",
    ),
    **{
        f"optimizer.params.{name}": Setting(is_part=True)
        for name in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad", "torch_adam",
                     "adam_w_mode")
    },
    "optimizer": Setting(verdict=DROP, note="torch.optim's fused=True and foreach=True are its fast forms"),
    "scheduler.type": Setting(
        verdict=DROP, note="any of torch.optim.lr_scheduler works; step it yourself, after "
                           "optimizer.step()", off=(None,)
    ),
    "scheduler": Setting(verdict=DROP),
    "communication_data_type": Setting(
        values={
            "fp32": "precision=fsdp.Precision(reduce_dtype=torch.float32)",
            "fp16": "precision=fsdp.Precision(reduce_dtype=torch.float16)",
            "bf16": "precision=fsdp.Precision(reduce_dtype=torch.bfloat16)",
            "bfp16": "precision=fsdp.Precision(reduce_dtype=torch.bfloat16)",
        }
    ),
    "activation_checkpointing": Setting("recompute=fsdp.by_class(Block)", note="of fsdp_wrap; name your block's class"),
    "elasticity": Setting(verdict=DROP, note="checkpoints load at any world size"),
    "pipeline": Setting(verdict=NONE, note="there is no pipeline parallelism"),
    "tensor_parallel": Setting(verdict=NONE, note="there is no tensor parallelism"),
    "sequence_parallel_size": Setting(verdict=NONE, note="there is no sequence parallelism", off=(1, None)),
    "compression_training": Setting(verdict=NONE, note="weights are not compressed"),
    "sparse_attention": Setting(verdict=NONE, note="attention is the model's"),
    "sparse_gradients": Setting(verdict=NONE, note="gradients are dense"),
    "data_efficiency": Setting(verdict=NONE, note="sampling is the data loader's"),
    "curriculum_learning": Setting(verdict=NONE, note="sampling is the data loader's"),
    **{
        name: Setting(verdict=DROP, note="`with fsdp.trace(model)` shows what a step does")
        for name in ("flops_profiler", "comms_logger", "wall_clock_breakdown", "memory_breakdown", "steps_per_print",
                     "dump_state")
    },
    **{
        name: Setting(verdict=DROP, note="log from the training loop")
        for name in ("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config")
    },
    **{
        name: Setting(verdict=DROP, note="without a meaning here", off=())
        for name in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "prescale_gradients", "aio",
                     "gradient_predivide_factor", "disable_allgather", "checkpoint", "data_types",
                     "dataloader_drop_last", "use_data_before_expert_parallelism",
                     "seq_parallel_communication_data_type", "nebula", "autotuning", "load_universal",
                     "graph_harvesting", "use_node_local_storage")
    },
}  # fmt: skip


def written_out(node: ast.AST) -> ast.Dict | None:
    """A dictionary that is written out, as ``{...}`` or as ``dict(...)``, with all inside it as ``{...}``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        keys = [ast.copy_location(ast.Constant(k.arg), k) if k.arg is not None else None for k in node.keywords]
        values = [keyword.value for keyword in node.keywords]
    elif isinstance(node, ast.Dict):
        keys, values = node.keys, node.values
    else:
        return None
    return ast.copy_location(ast.Dict(keys, [written_out(value) or value for value in values]), node)


def is_config(node: ast.Dict, alone: bool = False) -> bool:
    """Whether a dictionary is a configuration.

    Args:
        node: The dictionary.
        alone: It is the document of a file, or one in it: fewer signs are enough than in a script.
    """
    keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return bool(keys.intersection((*_SIGNS, "fp16", "bf16", "bfloat16", "optimizer") if alone else _SIGNS[:2]))


def literal(node: ast.expr) -> Any:
    """The value of an expression, in Python or in JSON; an object of its own if it is none."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {literal(key): literal(value) for key, value in zip(node.keys, node.values)}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return _UNKNOWN


def _settings(node: ast.Dict, above: str = "") -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Path, key and value of every setting, from the top."""
    for key, value in zip(node.keys, node.values):
        if not isinstance(key, ast.Constant):
            continue
        path = f"{above}{key.value}"
        if not above:
            path = _OTHER_NAMES.get(path, path)
            given = literal(value)
            if path in _WHOLE_SECTIONS and not isinstance(value, ast.Dict):
                if given is None:
                    continue
                path = f"{path}.{_WHOLE_SECTIONS[path]}"
                value = ast.copy_location(ast.Constant(int(given)), value) if path.endswith("stage") and isinstance(
                    given, bool) else value
        if isinstance(value, ast.Dict) and value.keys and (path in _sections() or not above):
            yield from _settings(value, path + ".")
        else:
            yield path, key, value


def _sections() -> set[str]:
    return {path.rpartition(".")[0] for path in SETTINGS if "." in path}


def _values(node: ast.Dict) -> dict[str, Any]:
    return {path: literal(value) for path, _, value in _settings(node)}


def wrap_options(node: ast.Dict) -> str:
    """``, stage=3, precision="bf16", ...`` for ``fsdp_wrap``."""
    values = _values(node)
    stage = str(values.get("zero_optimization.stage", 0))
    options = [f"stage={stage if stage in _STAGES else '...'}"]
    enabled = {word: values.get(f"{word}.enabled", False) for word in ("bf16", "fp16")}
    sure = [word for word, value in enabled.items() if value is True]
    if sure:
        options.append(f'precision="{sure[0]}"')
    elif any(value not in (False, None) for value in enabled.values()):
        options.append("precision=...")
    offload = _offload(values)
    if offload:
        options.append(f"offload=fsdp.Offload({offload})")
    return "".join(", " + option for option in options)


def _offload(values: Mapping[str, Any]) -> str:
    places = []
    if values.get("zero_optimization.offload_param.device") == "cpu":
        places.append('params="cpu"')
    place = values.get("zero_optimization.offload_optimizer.device")
    if place == "cpu" or values.get("zero_optimization.cpu_offload") is True:
        places.append('optimizer="cpu"')
    elif place == "nvme":
        places.append(f'optimizer="nvme", path="{_path(values)}"')
    return ", ".join(places)


def _path(values: Mapping[str, Any]) -> str:
    path = values.get("zero_optimization.offload_optimizer.nvme_path", "/mnt/nvme0/run")
    return json.dumps(str(path))[1:-1] if path is not _UNKNOWN else "..."


def findings(node: ast.Dict) -> list[Finding]:
    """What becomes of each setting, after one line that puts together what ``fsdp_wrap`` is given."""
    values = _values(node)
    found = [
        Finding(node.lineno, node.col_offset + 1, NAME, "configuration", CHANGE,
                f"fsdp.fsdp_wrap(model, policy{wrap_options(node)})",
                ("a policy names the classes of the blocks: fsdp.by_class(Block), or fsdp.from_model()",))
    ]  # fmt: skip
    said = set()
    for path, key, value in _settings(node):
        section = path.partition(".")[0]
        if values.get(f"{section}.enabled", _UNKNOWN) in (False, None):
            continue
        known = next((name for name in _from_inside(path) if name in SETTINGS), "")
        what = _finding(path, SETTINGS.get(known), values, key, value) if known not in said else None
        if what is not None:
            found.append(what)
            said.update({known} - {path, ""})  # what is said of a section is said once
    return found


def _finding(
    path: str, setting: Setting | None, values: Mapping[str, Any], key: ast.expr, value: ast.expr
) -> Finding | None:
    given = literal(value)
    shown = f"{path}: {ast.unparse(value)}"
    shown = shown if len(shown) <= 100 else shown[:97] + "..."

    def finding(verdict: str, write: str, note: str) -> Finding:
        notes = (note,) if note else ()
        return Finding(key.lineno, key.col_offset + 1, NAME, shown, verdict, write, notes)

    if setting is None:
        return finding(NONE, "", f"{path} is not known to this tool: look in the guide")
    if setting.is_part or any(given is off or (given == off and type(given) is type(off)) for off in setting.off):
        return None
    known_as = str(given)
    if path == "optimizer.type":  # DeepSpeed takes its own in any case of letters
        known = {name.lower(): name for name in (*setting.values, *setting.none)}
        known_as = known.get(known_as.lower(), known_as)
    if known_as in setting.none:
        return finding(NONE, "", setting.none[known_as])
    if given == "auto" and setting.verdict != DROP:
        return finding(CHANGE, setting.write.replace("{value}", "..."), "the Trainer fills it in: choose it yourself")
    write = setting.write
    if setting.values:
        if given is _UNKNOWN:
            known = ", ".join(f'"{name}" is {text}' for name, text in setting.values.items())
            return finding(CHANGE, "", f"it is chosen when it runs: {known}")
        if known_as not in setting.values:
            return finding(NONE, "", f"{path}: {ast.unparse(value)} is not known to this tool")
        write = setting.values[known_as]
    text = "..." if given is _UNKNOWN else ast.unparse(value)
    write = write.replace("{value}", text).replace("{path}", _path(values))
    write = re.sub(r"\{made:([\w.]+)\}", lambda match: _optimizer(match[1], values), write)
    return finding(setting.verdict, write, setting.note.replace("{value}", text))


def _from_inside(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _optimizer(name: str, values: Mapping[str, Any]) -> str:
    """The call that makes the optimizer, with the settings that torch's has too."""
    known = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad")
    parameters = "optimizer.params."
    given = {key: values[parameters + key] for key in known if parameters + key in values}
    if name == "torch.optim.AdamW":
        if str(values["optimizer.type"]).lower() == "adam" and values.get(parameters + "adam_w_mode") is False:
            name = "torch.optim.Adam"
        if values.get(parameters + "torch_adam") is not True:
            given.setdefault("weight_decay", 0.0)  # torch.optim.AdamW's own is 0.01
    settings = "".join(f", {key}={_shown(value)}" for key, value in given.items())
    if "optimizer=" in _offload(values):
        return f"fsdp.offloaded({name}, model{settings})"
    return f"{name}(model.parameters(){settings})"


def _shown(value: Any) -> str:
    return "..." if value is _UNKNOWN or value == "auto" else repr(tuple(value) if isinstance(value, list) else value)
