"""``torch.distributed.fsdp.FullyShardedDataParallel`` and what belongs to it."""

from __future__ import annotations

from .ddp import NO_SYNC_NOTE
from .rule import ANY, DROP, KEEP, NONE, UNIT, Argument, Engine, Rule

__all__ = ["CHECKPOINT_WRAPPER", "FSDP1", "NUMBERED_STRATEGIES", "REDUCE_NOTE", "STRATEGIES"]

_HYBRID_MESH = 'mesh=init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))'
_REST_NOTE = "or stage=3, reshard_after_forward=False, where parameters rest sharded, as they do in FSDP"
_HYBRID_NOTE = "replicas is the number of machines, shards that of the GPUs of each"
REDUCE_NOTE = "without a reduce_dtype gradients are reduced in fp32, not in param_dtype as there"
_STATE_NOTE = (
    "state_dict() always gives this rank's slices: whole tensors come from fsdp.full_state_dict(model), and "
    "fsdp.save_checkpoint(root, model, optimizer, step=step) writes slices; load_state_dict takes whole tensors"
)
_OPTIMIZER_NOTE = "the optimizer's state is saved and loaded with the model, at any number of ranks"

STRATEGIES = {
    "FULL_SHARD": "stage=3",
    "SHARD_GRAD_OP": "stage=2",
    "NO_SHARD": "stage=0",
    "HYBRID_SHARD": f"stage=3; {_HYBRID_MESH}",
    "_HYBRID_SHARD_ZERO2": f"stage=2; {_HYBRID_MESH}",
}
NUMBERED_STRATEGIES = {**STRATEGIES, **{str(number): text for number, text in enumerate(STRATEGIES.values(), 1)}}
_STRATEGY = Argument(
    values=NUMBERED_STRATEGIES,
    notes={"SHARD_GRAD_OP": _REST_NOTE, "HYBRID_SHARD": _HYBRID_NOTE, "_HYBRID_SHARD_ZERO2": _HYBRID_NOTE},
    otherwise="stage=...",
)

FSDP1 = Engine(
    "FSDP1",
    ("torch.distributed.fsdp",),
    (
        Rule(
            "FullyShardedDataParallel",
            "fsdp.fsdp_wrap({module}{options})",
            parameters="module process_group sharding_strategy cpu_offload auto_wrap_policy backward_prefetch "
                       "mixed_precision ignored_modules param_init_fn device_id sync_module_states",
            arguments={
                "auto_wrap_policy": Argument(to="1"),
                "sharding_strategy": _STRATEGY,
                "process_group": Argument(
                    to="mesh", note="a group is a mesh too; in place of a pair of groups a 2-D mesh is given"
                ),
                "device_mesh": Argument(to="mesh"),
                "mixed_precision": Argument(to="precision"),
                "backward_prefetch": Argument(
                    values={"BACKWARD_PRE": "", "BACKWARD_POST": "prefetch=0", "None": "prefetch=0"},
                    otherwise="prefetch=...",
                ),
                "cpu_offload": Argument(to="offload"),
                "ignored_modules": Argument(to="ignored"),
                "ignored_states": Argument(to="ignored"),
                "sync_module_states": Argument(
                    values={"True": "", "False": "sync_params=False"}, otherwise="sync_params=..."
                ),
                "param_init_fn": Argument(note="meta-device modules are filled by their reset_parameters, unit by "
                                               "unit"),
                "device_id": Argument(note="move the model first, or build it on the meta device: "
                                           "model.to(fsdp.init_distributed())"),
                "use_orig_params": Argument(note="nothing to do: parameters are always the ones you made",
                                            harmless=("None",)),
                "forward_prefetch": Argument(note="nothing to do: prefetch= is for forward and backward"),
                "limit_all_gathers": Argument(note="nothing to do: prefetch= limits them", harmless=("None",)),
            },
            reference=UNIT,
            handed_on="fsdp.fsdp_wrap",
            knows_all=True,
            makes="FSDP1 model",
        ),
        *(
            Rule(f"ShardingStrategy.{name}", text.replace("; ", ", "), note=_STRATEGY.notes.get(name, ""))
            for name, text in STRATEGIES.items()
        ),
        Rule("ShardingStrategy",
             note="FULL_SHARD is stage=3, SHARD_GRAD_OP stage=2, NO_SHARD stage=0, HYBRID_SHARD a 2-D mesh="),
        Rule(
            "MixedPrecision",
            "fsdp.Precision({options})",
            parameters="param_dtype reduce_dtype buffer_dtype keep_low_precision_grads cast_forward_inputs",
            knows_all=True,
            arguments={
                "param_dtype": Argument(to="param_dtype"),
                "reduce_dtype": Argument(to="reduce_dtype", absent_note=REDUCE_NOTE),
                "buffer_dtype": Argument(to="buffer_dtype"),
                "cast_forward_inputs": Argument(to="cast_forward_inputs", absent_note="inputs of all units are cast, "
                    "not only the root's; cast_forward_inputs=False casts none"),
                "_module_classes_to_ignore": Argument(to="keep"),
                "keep_low_precision_grads": Argument(none="gradients have the dtype of the fp32 masters"),
                "cast_root_forward_inputs": Argument(note="cast_forward_inputs, True by default, is for all units",
                                                     harmless=("True",)),
            },
        ),
        Rule(
            "CPUOffload",
            "{options}",
            parameters="offload_params",
            arguments={
                "offload_params": Argument(
                    values={"True": 'fsdp.Offload(params="cpu")', "False": "None"},
                    otherwise="fsdp.Offload(params=...)",
                    absent="None",
                )
            },
            note="parameters and gradients rest in host memory, where the optimizer works too",
        ),
        Rule("BackwardPrefetch.BACKWARD_PRE", verdict=DROP, note="prefetch=1 is the default"),
        Rule("BackwardPrefetch.BACKWARD_POST", "prefetch=0"),
        Rule("BackwardPrefetch", "prefetch=1", note="how many units are gathered ahead, in forward and in backward"),
        # -------------------------------------------------------------------------------------------- policies
        Rule("transformer_auto_wrap_policy", "fsdp.by_class({transformer_layer_cls!*=Block})",
             parameters="module recurse nonwrapped_numel transformer_layer_cls", reference="fsdp.by_class(Block)"),
        Rule("_module_wrap_policy", "fsdp.by_class({module_classes!*=Block})", reference="fsdp.by_class(Block)",
             parameters="module recurse nonwrapped_numel module_classes"),
        Rule("ModuleWrapPolicy", "fsdp.by_class({module_classes!*=Block})", parameters="module_classes",
             reference="fsdp.by_class(Block)"),
        Rule("lambda_auto_wrap_policy", "{lambda_fn!policy=fsdp.by_predicate(fn)}", reference="fsdp.by_predicate(fn)",
             parameters="module recurse nonwrapped_numel lambda_fn"),
        Rule("CustomPolicy", "{lambda_fn!policy=fsdp.by_predicate(fn)}", parameters="lambda_fn",
             note="the function answers True or False; options of one unit are given by wrapping it by itself",
             reference="fsdp.by_predicate(fn)"),
        Rule("_or_policy", "{policies!union=policy | other}", parameters="module recurse nonwrapped_numel policies",
             reference="policy | other"),
        Rule(
            "size_based_auto_wrap_policy",
            "fsdp.by_size({min_num_params=100_000_000})",
            parameters="module recurse nonwrapped_numel min_num_params force_leaf_modules exclude_wrap_modules",
            note="modules with at least so many elements that no unit below them took",
            reference="fsdp.by_size(100_000_000)",
        ),
        Rule("always_wrap_policy", "fsdp.by_size(1)", note="very small units: each pays a collective"),
        Rule("enable_wrap", "fsdp.fsdp_wrap(model, fsdp.by_class(Block))",
             note="build the plain model, then wrap it with one call"),
        Rule("wrap.wrap", "fsdp.fsdp_wrap({module})", parameters="module"),
        # ------------------------------------------------------------------------------------------ state dicts
        Rule("FullyShardedDataParallel.state_dict_type FullyShardedDataParallel.set_state_dict_type",
             "state = fsdp.full_state_dict({module})",
             parameters="module state_dict_type state_dict_config optim_state_dict_config", note=_STATE_NOTE,
             arguments={
                 "state_dict_type": Argument(templates={
                     "FULL_STATE_DICT": "state = fsdp.full_state_dict({module})",
                 } | {
                     name: "fsdp.save_checkpoint(root, {module}, optimizer, step=step)"
                     for name in ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
                 }),
             }),
        Rule("FullyShardedDataParallel.get_state_dict_type", verdict=DROP, note=_STATE_NOTE),
        Rule("StateDictType.FULL_STATE_DICT", "state = fsdp.full_state_dict(model)", note=_STATE_NOTE),
        Rule("StateDictType.SHARDED_STATE_DICT StateDictType.LOCAL_STATE_DICT",
             "fsdp.save_checkpoint(root, model, optimizer, step=step)", note=_STATE_NOTE),
        Rule("StateDictType StateDictSettings StateDictConfig OptimStateDictConfig OptimStateKeyType", verdict=DROP,
             note=_STATE_NOTE),
        Rule(
            "FullStateDictConfig",
            "fsdp.full_state_dict(model{options})",
            parameters="offload_to_cpu rank0_only",
            arguments={"rank0_only": Argument(to="rank0_only", absent="rank0_only=False"),
                       "offload_to_cpu": Argument(note="nothing to do: it gathers unit by unit into host memory")},
            reference="fsdp.full_state_dict(model)",
        ),
        Rule("ShardedStateDictConfig LocalStateDictConfig FullOptimStateDictConfig ShardedOptimStateDictConfig "
             "LocalOptimStateDictConfig", verdict=DROP, note=_STATE_NOTE),
        Rule("FullyShardedDataParallel.optim_state_dict FullyShardedDataParallel.full_optim_state_dict "
             "FullyShardedDataParallel.sharded_optim_state_dict",
             "fsdp.save_checkpoint(root, {model}, {optim=optimizer}, step=step)", parameters="model optim",
             note=_OPTIMIZER_NOTE),
        Rule("FullyShardedDataParallel.optim_state_dict_to_load",
             "fsdp.load_checkpoint(root, {model}, {optim=optimizer})", parameters="model optim optim_state_dict",
             note=_OPTIMIZER_NOTE),
        Rule("FullyShardedDataParallel.shard_full_optim_state_dict "
             "FullyShardedDataParallel.scatter_full_optim_state_dict "
             "FullyShardedDataParallel.flatten_sharded_optim_state_dict",
             "fsdp.load_checkpoint(root, {model}, optimizer)", parameters="full_optim_state_dict model",
             note=_OPTIMIZER_NOTE),
        Rule("FullyShardedDataParallel.rekey_optim_state_dict", verdict=DROP, note="state is matched by names"),
        # ------------------------------------------------------------------------------------------ whole values
        Rule(
            "FullyShardedDataParallel.summon_full_params",
            "fsdp.full_params({module}{options})",
            parameters="module recurse writeback rank0_only offload_to_cpu with_grads",
            arguments={
                "writeback": Argument(values={"True": "writeback=True", "False": ""}, otherwise="writeback=...",
                                      absent="writeback=True"),
                "rank0_only": Argument(note="parameters are whole on every rank; rank 0 alone in host memory is "
                                            "fsdp.full_state_dict(model)"),
                "offload_to_cpu": Argument(note="whole values in host memory are fsdp.full_state_dict(model)"),
                "with_grads": Argument(note="gradients: fsdp.full_grad(model, name)"),
                "recurse": Argument(note="True is the only way; give it the one module that is meant",
                                    harmless=("True",)),
            },
            note="writeback is False unless asked for; without it the dtype is that of the computation",
        ),
        Rule("summon_full_params", "fsdp.full_params({module}, writeback=True)", parameters="module", of=ANY,
             note="writeback is False unless asked for"),
        Rule("FullyShardedDataParallel.clip_grad_norm_", "{module}.clip_grad_norm_({max_norm}{options})", KEEP,
             parameters="module max_norm norm_type", arguments={"norm_type": Argument(to="norm_type")}),
        Rule("clip_grad_norm_", verdict=KEEP, note="works the same, and returns the global norm",
             of=f"FSDP1 model|{ANY}"),
        Rule("no_sync", verdict=KEEP, note=NO_SYNC_NOTE, of="FSDP1 model"),
        Rule("FullyShardedDataParallel.fsdp_modules", "[m for m in {module}.modules() if isinstance(m, fsdp.FSDPUnit)]",
             parameters="module root_only"),
        Rule("module", "{self}", DROP, "the wrapped model is the model itself", of="FSDP1 model", is_attribute=True),
        Rule("FlatParameter", verdict=DROP, note="model.parameters() are the ones you made, each this rank's slice"),
    ),
    is_complete=True,
)  # fmt: skip

_RECOMPUTE_NOTE = "an option of fsdp_wrap; no wrapper, and no prefix in names"

CHECKPOINT_WRAPPER = Engine(
    "recomputation",
    ("torch.distributed.algorithms._checkpoint", "torch.distributed._composable"),
    (
        Rule("apply_activation_checkpointing", "recompute={check_fn!policy=@auto_wrap_policy}",
             parameters="model checkpoint_wrapper_fn check_fn auto_wrap_policy", note=_RECOMPUTE_NOTE,
             covers="checkpoint_wrapper_fn"),
        Rule("checkpoint_wrapper checkpoint", "recompute=fsdp.by_class(Block)", note=_RECOMPUTE_NOTE,
             parameters="module checkpoint_impl",
             arguments={"checkpoint_impl": Argument(values={"NO_REENTRANT": "", "REENTRANT": ""})}),
        Rule("CheckpointWrapper", "recompute=fsdp.by_class(Block)", note=_RECOMPUTE_NOTE),
        Rule("CheckpointImpl CheckpointImpl.NO_REENTRANT CheckpointImpl.REENTRANT", verdict=DROP,
             note="recomputation is always the one without reentrant autograd"),
        Rule("offload_wrapper OffloadWrapper", verdict=NONE,
             note="activations are recomputed (recompute=), not offloaded"),
    ),
)  # fmt: skip
