"""DistributedDataParallel, and what scripts use beside it."""

from __future__ import annotations

from .rule import ANY, CHANGE, DROP, KEEP, NONE, UNIT, Argument, Engine, Rule

__all__ = ["DDP", "DDP_TOOLS", "NO_SYNC_NOTE", "SCALERS", "SHARED"]

NO_SYNC_NOTE = "works the same, at every stage; it holds a whole gradient"

DDP = Engine(
    "DDP",
    ("torch.nn",),
    (
        Rule(
            "DistributedDataParallel",
            "fsdp.fsdp_wrap({module}{options}, stage=0)",
            parameters="module device_ids output_device dim broadcast_buffers init_sync process_group bucket_cap_mb "
                       "find_unused_parameters check_reduction gradient_as_bucket_view static_graph",
            arguments={
                "process_group": Argument(to="mesh"),
                "device_mesh": Argument(to="mesh"),
                "init_sync": Argument(values={"True": "", "False": "sync_params=False"}, otherwise="sync_params=..."),
                "device_ids": Argument(note="move the model to the device first: model.to(fsdp.init_distributed())"),
                "output_device": Argument(note="leave it out"),
                "find_unused_parameters": Argument(note="nothing to do: unused parameters work"),
                "static_graph": Argument(note="nothing to do: the order of units is recorded"),
                "gradient_as_bucket_view": Argument(note="nothing to do: gradients are views of the reduced shard"),
                "bucket_cap_mb": Argument(note="units take the place of buckets: a policy sets their size"),
                "broadcast_buffers": Argument(
                    note="buffers start from rank 0's and are each rank's own afterwards", harmless=("None",)
                ),
                "mixed_precision": Argument(note='precision="bf16" of fsdp_wrap'),
                "bucket_cap_mb_list": Argument(note="units take the place of buckets: a policy sets their size"),
                "batched_grad_copy": Argument(note="nothing to do: gradients are copied as they come"),
                "skip_all_reduce_unused_params": Argument(note="nothing to do: unused parameters work"),
                "forward_sync_buffers": Argument(
                    note="buffers start from rank 0's and are each rank's own afterwards", harmless=("None",)
                ),
                "delay_all_reduce_named_params": Argument(none="nothing is reduced by name"),
                "param_to_hook_all_reduce": Argument(none="nothing is reduced by name"),
            },
            note="stages 1 to 3 with a policy save memory: fsdp.fsdp_wrap(model, fsdp.by_class(Block)); the module "
                 "stays the one it was, without .module",
            reference=UNIT,
            knows_all=True,
            handed_on="functools.partial(fsdp.fsdp_wrap, stage=0)",
            makes="DDP model",
        ),
        Rule(
            "DataParallel",
            "fsdp.fsdp_wrap({module}, stage=0)",
            parameters="module device_ids output_device dim",
            note="one process per GPU, each with its own part of the batch: start it with torchrun; "
                 "device = fsdp.init_distributed()",
            reference=UNIT,
            handed_on="functools.partial(fsdp.fsdp_wrap, stage=0)",
            makes="DDP model",
        ),
        Rule("no_sync", verdict=KEEP, note=NO_SYNC_NOTE, of="DDP model"),
        Rule("module", "{self}", DROP, "the wrapped model is the model itself", of="DDP model", is_attribute=True),
        Rule("join", verdict=NONE,
             note="ranks run the same number of steps: give a rank without data a dummy batch, its loss times zero",
             of="DDP model"),
        Rule(
            "register_comm_hook",
            "{options}",
            parameters="state hook",
            arguments={
                "hook": Argument(
                    values={
                        "allreduce_hook": "",
                        "bf16_compress_hook": "precision=fsdp.Precision(reduce_dtype=torch.bfloat16)",
                        "fp16_compress_hook": "precision=fsdp.Precision(reduce_dtype=torch.float16)",
                    },
                    none="gradients are reduced by one reduce-scatter, in a dtype that may be chosen",
                    harmless=("allreduce_hook", "bf16_compress_hook", "fp16_compress_hook"),
                )
            },
            of="DDP model|FSDP1 model",
        ),
        Rule("_set_static_graph", verdict=DROP, note="the order of units is recorded", of="DDP model"),
        Rule(
            "utils.clip_grad_norm_ utils.clip_grad.clip_grad_norm_",
            "{parameters!owner}.clip_grad_norm_({max_norm}{options})",
            KEEP,
            "it gives the same result, more slowly",
            parameters="parameters max_norm norm_type",
            arguments={
                "norm_type": Argument(to="norm_type"),
                "error_if_nonfinite": Argument(note="the norm that is returned tells"),
            },
        ),
        Rule("utils.get_total_norm", 'norm = model.clip_grad_norm_(float("inf"))',
             note="the norm of slices is no norm: this only measures"),
        Rule("utils.clip_grads_with_norm_",
             "{parameters!owner}.clip_grad_norm_({max_norm})", parameters="parameters max_norm total_norm",
             note="it measures and clips"),
        Rule("utils.parameters_to_vector utils.convert_parameters.parameters_to_vector",
             "fsdp.full_params({parameters!owner})",
             note="a context: inside it the vector is whole, outside it would be one of slices",
             parameters="parameters"),
        Rule("utils.vector_to_parameters utils.convert_parameters.vector_to_parameters",
             "fsdp.full_params({parameters!owner}, writeback=True)", parameters="vec parameters",
             note="a context: inside it parameters are whole, and are written back at its end"),
        Rule("utils.stateless.functional_call", verdict=NONE,
             note="a wrapped model keeps its own weights, and refuses it"),
    ),
)  # fmt: skip

_JOIN_NOTE = "ranks run the same number of steps: give a rank without data a dummy batch, its loss times zero"
_WIRE_NOTE = "a dtype on the wire is an option of fsdp_wrap; fp32 is the default"

DDP_TOOLS = Engine(
    "torch",
    ("torch.distributed", "torch"),
    (
        Rule(
            "distributed.init_process_group distributed.distributed_c10d.init_process_group",
            "device = fsdp.init_distributed({options})",
            KEEP,
            "or leave it: a group that exists is used. fsdp.init_distributed also picks the device",
            parameters="backend init_method timeout world_size rank",
            arguments={
                "backend": Argument(to="1"),
                "timeout": Argument(to="timeout"),
                **{
                    name: Argument(note=f"fsdp.init_distributed reads torchrun's variables and takes no {name}: where "
                                        "processes are started in another way (mp.spawn), keep this line")
                    for name in ("rank", "world_size", "init_method", "store")
                },
            },
        ),
        Rule("algorithms.join.Join algorithms.Join", verdict=NONE, note=_JOIN_NOTE),
        Rule(
            "bf16_compress_hook bf16_compress_wrapper",
            "precision=fsdp.Precision(reduce_dtype=torch.bfloat16)",
            note=_WIRE_NOTE,
        ),
        Rule(
            "fp16_compress_hook fp16_compress_wrapper",
            "precision=fsdp.Precision(reduce_dtype=torch.float16)",
            note=_WIRE_NOTE,
        ),
        Rule("allreduce_hook", verdict=DROP, note="this is what is done"),
        Rule(
            "powerSGD_hook batched_powerSGD_hook PowerSGDState post_localSGD_hook PostLocalSGDState "
            "PostLocalSGDOptimizer quantization_pertensor_hook quantization_perchannel_hook PeriodicModelAverager",
            verdict=NONE,
            note="gradients are reduced exactly, in every synchronised backward",
        ),
        Rule(
            "optim.ZeroRedundancyOptimizer",
            "{optimizer_class}({params}{options})",
            parameters="params optimizer_class",
            arguments={
                name: Argument(to=name)
                for name in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad", "fused",
                             "foreach", "alpha", "centered", "dampening", "etas", "initial_accumulator_value", "lambd",
                             "lr_decay", "maximize", "momentum_decay", "rho", "step_sizes", "capturable",
                             "differentiable", "decoupled_weight_decay")
            },
            note="the plain optimizer, with fsdp.fsdp_wrap(model, policy, stage=1): its state is sharded by the "
                 "wrapping",
            reference="torch.optim.Optimizer",
            makes="ZeRO optimizer",
        ),
        Rule("consolidate_state_dict", verdict=DROP, note="fsdp.save_checkpoint writes each rank's part",
             of="ZeRO optimizer"),
        Rule("jit.script jit.trace", verdict=NONE, reference="",
             note="TorchScript modules are refused: block.compile() compiles a block"),
        Rule("func.functional_call", verdict=NONE, note="a wrapped model keeps its own weights, and refuses it"),
        Rule(
            "autocast amp.autocast cuda.amp.autocast amp.autocast_mode.autocast",
            verdict=KEEP,
            note='precision="bf16" in fsdp_wrap takes its place; under autocast its low precision copies of all '
                 'weights '
            "live until backward",
        ),
    ),
)  # fmt: skip

_SCALER_ARGUMENTS = {
    name: Argument(to=name)
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
}

SCALERS = Engine(
    "torch.amp",
    ("torch",),
    tuple(
        Rule(
            name,
            "fsdp.LossScaler({options})",
            CHANGE,
            "the methods are the same; an overflow on any rank skips the step on all",
            parameters=parameters,
            arguments=_SCALER_ARGUMENTS,
            reference="fsdp.LossScaler",
        )
        for name, parameters in (
            ("amp.GradScaler amp.grad_scaler.GradScaler", "device init_scale growth_factor backoff_factor "
                                                          "growth_interval"),
            ("cuda.amp.GradScaler", "init_scale growth_factor backoff_factor growth_interval enabled"),
            ("sharded_grad_scaler.ShardedGradScaler", "device init_scale backoff_factor growth_factor growth_interval "
                                                      "enabled"),
        )
    ),
)

SHARED = Engine("DDP or FSDP1", ("torch.nn",), (Rule("no_sync", verdict=KEEP, note=NO_SYNC_NOTE, of=ANY),))
