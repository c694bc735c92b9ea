"""Megatron-FSDP."""

from __future__ import annotations

from .rule import ANY, DROP, NONE, UNIT, Argument, Engine, Rule

__all__ = ["MEGATRON_FSDP"]

_STAGES = {
    "0": "stage=0", "no_shard": "stage=0", "1": "stage=1", "optim": "stage=1", "2": "stage=2", "optim_grads": "stage=2",
    "3": "stage=3", "optim_grads_params": "stage=3",
}  # fmt: skip

_MODEL_ARGUMENTS = {
    "zero_dp_strategy": Argument(values=_STAGES, otherwise="stage=..."),
    "device_mesh": Argument(to="mesh", note="the 1-D (shard) or 2-D (replicate, shard) part of it that is data "
                                            "parallel"),
    "outer_dp_sharding_strategy": Argument(none="replicas of a hybrid mesh hold whole copies of a shard's state",
                                           harmless=("None", "0", "no_shard")),
    "tp_dim": Argument(none="there is no tensor parallelism"),
    "expt_device_mesh": Argument(none="there is no expert parallelism"),
    "hybrid_fsdp_group": Argument(note="leave it out: a 2-D mesh says all"),
    "init_model_with_meta_device": Argument(note="nothing to do: a model built on the meta device is made real unit by "
                                                 "unit"),
    "grad_reduce_in_fp32": Argument(note="nothing to do: it is so", harmless=("None", "False")),
    "preserve_fp32_weights": Argument(none="masters are fp32 whenever a low precision is computed in",
                                      harmless=("None", "True")),
    "mixed_precision_policy": Argument(to="precision"),
    "sync_model_each_microbatch": Argument(note="with model.no_sync(): around all microbatches but the last",
                                           harmless=("None", "True")),
    "sync_grads_each_step": Argument(note="with model.no_sync(): around all microbatches but the last",
                                     harmless=("None", "True")),
    "calculate_per_token_loss": Argument(note="model.set_gradient_divide_factor(x) sets the divisor"),
    "check_for_nan_in_grad": Argument(note="leave it out: the norm that model.clip_grad_norm_ returns tells",
                                      harmless=("None", "False")),
    "keep_fp8_transpose_cache": Argument(none="there is no fp8"),
    "report_nan_in_param_grad": Argument(note="leave it out: the norm that model.clip_grad_norm_ returns tells"),
}  # fmt: skip

MEGATRON_FSDP = Engine(
    "Megatron-FSDP",
    ("megatron_fsdp", "megatron.core.distributed.fsdp", "megatron.core.distributed"),
    (
        Rule(
            "fully_shard fully_shard_model",
            "fsdp.fsdp_wrap({module}, fsdp.by_class({fsdp_unit_modules!*=Block}){options})",
            parameters="module",
            arguments=_MODEL_ARGUMENTS,
            note="the model stays the module that it was, and the optimizer a plain one; nothing else is returned",
            makes="Megatron-FSDP model",
        ),
        Rule("fully_shard_optimizer", verdict=DROP, note="the optimizer stays a plain one"),
        Rule("MegatronFSDP FullyShardedDataParallel mcore_fsdp_adapter.FullyShardedDataParallel",
             "fsdp.fsdp_wrap({module})", parameters="config ddp_config module", reference=UNIT,
             handed_on="fsdp.fsdp_wrap",
             makes="Megatron-FSDP model"),
        Rule(
            "MixedPrecisionPolicy",
            "fsdp.Precision({options})",
            arguments={
                "grad_comm_dtype": Argument(to="reduce_dtype"),
                "main_params_dtype": Argument(none="masters are fp32", harmless=("None", "float32")),
                "main_grads_dtype": Argument(none="gradients of masters are fp32", harmless=("None", "float32")),
            },
            note="computes in the dtype that param_dtype= names: torch.bfloat16, where the model was bf16",
        ),
        Rule("DistributedDataParallelConfig distributed_data_parallel_config.DistributedDataParallelConfig",
             verdict=DROP, note="options are arguments of fsdp_wrap"),
        Rule("FSDPDistributedIndex", verdict=DROP, note="mesh= is the 1-D or 2-D mesh of data parallelism"),
        Rule("DistributedDataParallel", "fsdp.fsdp_wrap({module}, stage=0)", parameters="config ddp_config module",
             reference=UNIT, handed_on="functools.partial(fsdp.fsdp_wrap, stage=0)", makes="Megatron-FSDP model"),
        Rule("finalize_model_grads", verdict=DROP, note="gradients are reduced in backward"),
        Rule("module", "{self}", DROP, "the wrapped model is the model itself", of="Megatron-FSDP model",
             is_attribute=True),
        Rule("set_model_auto_sync sync", "model.no_sync()", of="Megatron-FSDP model",
             note="a context, around all microbatches but the last"),
        Rule("finish_grad_sync install_optimized_model_weights start_grad_sync", verdict=DROP, of="Megatron-FSDP model",
             note="backward ends with reduced gradients, and the optimizer updates the masters"),
        Rule("zero_grad_buffer", "optimizer.zero_grad()", of=ANY),
        Rule("start_param_sync", verdict=NONE, note="gathers cannot be started by hand", of="Megatron-FSDP model"),
    ),
)  # fmt: skip
