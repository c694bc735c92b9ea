"""DeepSpeed's ZeRO: the engine, its contexts and helpers. Its configuration is in ``config_settings``."""

from __future__ import annotations

from .rule import DROP, KEEP, NONE, UNIT, Argument, Engine, Rule

__all__ = ["DEEPSPEED"]

_KIND = "DeepSpeed engine"
_ACCUMULATE = "count microbatches yourself, and put `with model.no_sync():` around all but the last to reduce only once"
_OLD = "it reads checkpoints of the old run: model.load_state_dict of what it returns, on every rank"

DEEPSPEED = Engine(
    "DeepSpeed",
    ("deepspeed",),
    (
        Rule(
            "initialize",
            "fsdp.fsdp_wrap({model}, policy{config!settings})",
            parameters="args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
                       "dist_init_required collate_fn config",
            arguments={
                "training_data": Argument(note="make the DataLoader yourself, with a DistributedSampler"),
                "lr_scheduler": Argument(note="step the scheduler yourself, after optimizer.step()"),
                "mpu": Argument(none="there is no model parallelism"),
            },
            note="returns the model only: the optimizer is a plain one of torch.optim, or "
                 "fsdp.offloaded(torch.optim.AdamW, model, lr=...), made after it",
            makes=_KIND,
        ),
        Rule("init_distributed comm.init_distributed", "device = fsdp.init_distributed()"),
        Rule("add_config_arguments", verdict=DROP, note="options are arguments of fsdp_wrap"),
        Rule("DeepSpeedEngine runtime.engine.DeepSpeedEngine", UNIT),
        # ------------------------------------------------------------------------------------------- the engine
        Rule("backward", "{loss}.backward()", of=_KIND, parameters="loss",
             note="with gradient accumulation divide the loss yourself: the engine did"),
        Rule("step", "optimizer.step()", of=_KIND,
             note="then optimizer.zero_grad(); clipping is model.clip_grad_norm_(max_norm) before it, and the "
                  "scheduler steps after it"),
        Rule("zero_grad", "optimizer.zero_grad()", of=_KIND),
        Rule("module", "{self}", DROP, "the wrapped model is the model itself", of=_KIND, is_attribute=True),
        Rule("save_checkpoint", "fsdp.save_checkpoint({save_dir}, {self}, optimizer, step=step{options})", of=_KIND,
             parameters="save_dir tag client_state save_latest", arguments={"client_state": Argument(to="extra")},
             note="the latest step is found by itself"),
        Rule("load_checkpoint", "report = fsdp.load_checkpoint({load_dir}, {self}, optimizer)", of=_KIND,
             parameters="load_dir tag",
             note="report.extra is what client_state was; an old checkpoint has to be converted first (zero_to_fp32)"),
        Rule("save_16bit_model save_fp16_model", "state = fsdp.full_state_dict({self}, dtype=torch.bfloat16)", of=_KIND,
             note="on every rank; rank 0 saves it. Or fsdp.export_safetensors of a saved step"),
        Rule("gradient_accumulation_steps is_gradient_accumulation_boundary set_gradient_accumulation_boundary",
             verdict=DROP, note=_ACCUMULATE, of=_KIND),
        Rule("no_sync", verdict=KEEP, note="works at every stage", of=_KIND),
        Rule("get_global_grad_norm", "norm = {self}.clip_grad_norm_(max_norm)", of=_KIND,
             note="clipping returns the norm"),
        Rule("device", "device", of=_KIND, is_attribute=True, note="what fsdp.init_distributed() returned"),
        Rule("get_lr", "scheduler.get_last_lr()", of=_KIND),
        Rule("optimizer", "optimizer", of=_KIND, is_attribute=True, note="the one that you made"),
        Rule("lr_scheduler", "scheduler", of=_KIND, is_attribute=True, note="the one that you made"),
        Rule("global_steps global_samples micro_steps skipped_steps", verdict=DROP, of=_KIND, is_attribute=True,
             note="count steps yourself; fsdp.save_checkpoint takes the step, and extra= other counters"),
        Rule("cur_scale loss_scale", "scaler.get_scale()", of=_KIND, is_attribute=True, note="of fsdp.LossScaler"),
        Rule("zero_optimization_stage zero_optimization zero_optimization_partition_weights "
             "zero_optimization_partition_gradients bfloat16_enabled fp16_enabled "
             "zero_gather_16bit_weights_on_model_save gradient_clipping zero_offload_optimizer zero_offload_param",
             verdict=DROP, of=_KIND, note="it is what fsdp_wrap was told"),
        Rule("_zero3_consolidated_16bit_state_dict _consolidated_16bit_state_dict",
             "state = fsdp.full_state_dict({self}, dtype=torch.bfloat16)", of=_KIND,
             note="on every rank; rank 0 has it"),
        Rule("destroy empty_partition_cache allreduce_gradients set_train_batch_size", verdict=DROP, of=_KIND,
             note="nothing to do"),
        Rule("local_rank global_rank world_size", verdict=DROP, of=_KIND, is_attribute=True,
             note="torch.distributed.get_rank() and get_world_size()"),
        Rule("train_batch_size train_micro_batch_size_per_gpu", verdict=DROP, note="the data loader's", of=_KIND),
        Rule("deepspeed_io", verdict=DROP, note="make the DataLoader yourself, with a DistributedSampler", of=_KIND),
        Rule("train_batch eval_batch", verdict=NONE, note="there is no pipeline parallelism", of=_KIND),
        # ---------------------------------------------------------------------------------------- parameters
        Rule("zero.Init partition_parameters.Init", 'torch.device("meta")',
             note="a context, around the construction; fsdp.fsdp_wrap then makes units real one at a time, by "
                  "reset_parameters, or weights are loaded afterwards"),
        Rule(
            "zero.GatheredParameters partition_parameters.GatheredParameters",
            "fsdp.full_params(module{options})",
            parameters="params modifier_rank fwd_module enabled",
            arguments={"modifier_rank": Argument(values={"None": "", "0": "writeback=True; rank0_writes=True"},
                                                 otherwise="writeback=True; rank0_writes=True")},
            note="it takes the module that holds the parameters",
        ),
        Rule("zero.register_external_parameter zero.unregister_external_parameter "
             "partition_parameters.register_external_parameter partition_parameters.unregister_external_parameter",
             verdict=DROP,
             note="a weight that two units use is tied before wrapping; a module that lends its weights shares their "
                  "unit"),
        Rule("zero.TiledLinear zero.tiling.TiledLinear", verdict=NONE, note="a layer is gathered whole"),
        Rule("utils.set_z3_leaf_modules utils.z3_leaf_module.set_z3_leaf_modules",
             "fsdp.by_class({leaf_module_classes!*=Block})", parameters="model leaf_module_classes",
             note="in the policy: a module of these classes is a unit, and nothing inside it is"),
        Rule("partition_parameters.ZeroParamStatus", verdict=DROP,
             note="weights outside forward are this rank's slices, and say so: there is no status to ask"),
        Rule("utils.safe_get_full_fp32_param utils.safe_set_full_fp32_param",
             "fsdp.full_params(module, writeback=True)",
             note="a context: inside it the module's parameters are the whole fp32 masters"),
        Rule("utils.safe_get_full_grad", "fsdp.full_grad(model, name)", note="every rank calls it"),
        Rule("utils.safe_get_local_fp32_param", "parameter.detach()", note="a parameter is this rank's slice"),
        Rule("utils.safe_get_local_grad", "parameter.grad", note="it is this rank's slice"),
        Rule("utils.safe_get_local_optimizer_state utils.safe_set_local_optimizer_state",
             "optimizer.state[parameter][key]", note="it is this rank's slice"),
        Rule("utils.safe_get_full_optimizer_state utils.safe_set_full_optimizer_state utils.safe_set_full_grad",
             verdict=NONE,
             note="optimizer state and gradients are written as slices; whole state is read from a checkpoint"),
        Rule("utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint "
             "utils.zero_to_fp32.load_state_dict_from_zero_checkpoint "
             "utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict", verdict=KEEP, note=_OLD),
        # ------------------------------------------------------------------------------------------- the rest
        Rule("ops.adam.DeepSpeedCPUAdam ops.adam.FusedAdam ops.adam.cpu_adam.DeepSpeedCPUAdam "
             "ops.adam.fused_adam.FusedAdam",
             "torch.optim.AdamW({model_params=model.parameters()}{options})",
             parameters="model_params lr",
             arguments={
                 **{name: Argument(to=name) for name in ("lr", "betas", "eps", "amsgrad")},
                 "weight_decay": Argument(to="weight_decay", absent="weight_decay=0.0"),
                 **{name: Argument(templates={"False": "torch.optim.Adam({model_params=model.parameters()}{options})"},
                                   harmless=("True", "False"), note="False is torch.optim.Adam, True AdamW")
                    for name in ("adamw_mode", "adam_w_mode")},
                 "bias_correction": Argument(none="torch.optim corrects it always", harmless=("True",)),
             },
             note="its weight_decay is 0 unless given; fused=True is torch's fastest; state in host memory: "
                  "offload=fsdp.Offload(optimizer=\"cpu\") and "
                  "fsdp.offloaded(torch.optim.AdamW, model)", reference="torch.optim.AdamW"),
        Rule("ops.lamb.FusedLamb", verdict=NONE, note="it reads whole tensors: use an element-wise optimizer"),
        Rule("checkpointing.checkpoint checkpointing.configure "
             "runtime.activation_checkpointing.checkpointing.checkpoint", "recompute=fsdp.by_class(Block)",
             note="an option of fsdp_wrap; torch.utils.checkpoint works too"),
        Rule("get_accelerator accelerator.get_accelerator", verdict=DROP, note="torch.cuda has what it gives"),
        Rule("runtime.lr_schedules.WarmupLR runtime.lr_schedules.WarmupDecayLR runtime.lr_schedules.WarmupCosineLR",
             verdict=DROP, note="any of torch.optim.lr_scheduler works"),
        Rule("comm.get_rank comm.get_world_size comm.barrier comm.all_reduce comm.broadcast comm.all_gather",
             verdict=DROP, note="torch.distributed has it under the same name"),
        Rule("utils.logger utils.log_dist utils.logging.logger utils.logging.log_dist", verdict=DROP,
             note="log on rank 0: torch.distributed.get_rank()"),
        Rule("PipelineModule pipe.PipelineModule pipe.LayerSpec pipe.TiedLayerSpec", verdict=NONE,
             note="there is no pipeline parallelism"),
        Rule("moe.layer.MoE", verdict=NONE, note="there is no expert parallelism; experts as plain modules work"),
        Rule("init_inference tp_model_init", verdict=NONE, note="fsdplite trains"),
    ),
    is_complete=True,
)  # fmt: skip
