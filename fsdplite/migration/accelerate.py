"""Accelerate, and trainers that wrap the model themselves."""

from __future__ import annotations

from .fsdp1 import NUMBERED_STRATEGIES, STRATEGIES
from .rule import DROP, KEEP, NONE, Argument, Engine, Rule

__all__ = ["ACCELERATE", "TRAINERS"]

_KIND = "Accelerator"
_STRATEGIES = {
    **NUMBERED_STRATEGIES,
    "HYBRID_SHARD_ZERO2": STRATEGIES["_HYBRID_SHARD_ZERO2"],
}
_WORD = Argument(
    values={"no": "", "False": "", "bf16": 'precision="bf16"', "fp16": 'precision="fp16"'},
    notes={"fp16": "with scaler = fsdp.LossScaler(), used as torch.amp.GradScaler is"}, otherwise="precision=...",
)  # fmt: skip
_COLLECTIVE = "torch.distributed has the collective"

ACCELERATE = Engine(
    "Accelerate",
    ("accelerate",),
    (
        Rule(
            "FullyShardedDataParallelPlugin",
            "fsdp.fsdp_wrap(model, fsdp.by_class({transformer_cls_names_to_wrap!*=Block}){options})",
            arguments={
                "sharding_strategy": Argument(values=_STRATEGIES, otherwise="stage=..."),
                "reshard_after_forward": Argument(
                    values={**_STRATEGIES, "True": "", "False": "reshard_after_forward=False"}, otherwise="stage=..."
                ),
                "cpu_offload": Argument(
                    to="offload", values={"True": 'offload=fsdp.Offload(params="cpu")', "False": ""}
                ),
                "mixed_precision": _WORD,
                "mixed_precision_policy": Argument(to="precision"),
                "auto_wrap_policy": Argument(
                    values={"transformer_based_wrap": "", "TRANSFORMER_BASED_WRAP": ""},
                    notes={"size_based_wrap": "the policy is fsdp.by_size(min_num_params)",
                           "SIZE_BASED_WRAP": "the policy is fsdp.by_size(min_num_params)",
                           "NO_WRAP": "no policy: the whole model is one unit"},
                    to="policy",
                ),
                "min_num_params": Argument(note="the policy is fsdp.by_size of it"),
                "activation_checkpointing": Argument(values={"True": "recompute=fsdp.by_class(Block)", "False": ""},
                                                     otherwise="recompute=..."),
                "ignored_modules": Argument(to="ignored"),
                "sync_module_states": Argument(values={"True": "", "False": "sync_params=False"},
                                               otherwise="sync_params=..."),
                "state_dict_type": Argument(note="fsdp.save_checkpoint saves shards, fsdp.full_state_dict gives the "
                                                 "whole"),
                "cpu_ram_efficient_loading": Argument(note="build on the meta device, then "
                                                           "fsdp.load_safetensors(model, folder): each rank reads what "
                                                           "it holds"),
            },
            note="fsdp.from_model() is the policy that reads the model's _no_split_modules",
        ),
        Rule(
            "DeepSpeedPlugin",
            "fsdp.fsdp_wrap(model, policy{options})",
            arguments={
                "zero_stage": Argument(to="stage"),
                "mixed_precision": _WORD,
                "offload_optimizer_device": Argument(
                    values={"cpu": 'offload=fsdp.Offload(optimizer="cpu")', "none": "",
                            "nvme": 'offload=fsdp.Offload(optimizer="nvme", path="/mnt/nvme0/run")'},
                    otherwise="offload=..."),
                "offload_param_device": Argument(values={"cpu": 'offload=fsdp.Offload(params="cpu")', "none": ""},
                                                 otherwise="offload=..."),
                "gradient_clipping": Argument(note="model.clip_grad_norm_ of it, before optimizer.step()"),
                "gradient_accumulation_steps": Argument(note="divide the loss by it, and step after as many backwards"),
                "hf_ds_config": Argument(note="give the JSON file as a PATH too"),
            },
        ),
        Rule(
            "Accelerator",
            "device = fsdp.init_distributed()",
            arguments={
                "mixed_precision": Argument(note='precision="bf16" or "fp16" in fsdp_wrap; "fp16" with fsdp.LossScaler',
                                            harmless=("None", "no")),
                "gradient_accumulation_steps": Argument(note="divide the loss by it, and step after as many backwards",
                                                        harmless=("None", "1")),
                "log_with": Argument(note="log from the training loop, on rank 0"),
            },
            note="wrap the model yourself; started with torchrun instead of accelerate launch",
            makes=_KIND,
        ),
        Rule("prepare", "{args!models}", of=_KIND, parameters="*args",
             note="the model only: the optimizer stays plain, and the loader takes a DistributedSampler; Accelerate's "
                  "scheduler goes as many steps at once as there are ranks (unless split_batches=True), a plain one "
                  "one"),
        Rule("prepare_model", "fsdp.fsdp_wrap({model}, policy)", of=_KIND, parameters="model"),
        Rule("prepare_optimizer prepare_scheduler prepare_data_loader", verdict=DROP, of=_KIND,
             note="they stay plain; the loader takes a DistributedSampler, and batches go to the device by hand"),
        Rule("backward", "{loss}.backward()", of=_KIND, parameters="loss",
             note="with gradient accumulation divide the loss yourself: Accelerate did"),
        Rule("clip_grad_norm_", "{parameters!owner}.clip_grad_norm_({max_norm}{options})", of=_KIND,
             parameters="parameters max_norm norm_type", arguments={"norm_type": Argument(to="norm_type")}),
        Rule("clip_grad_value_", "torch.nn.utils.clip_grad_value_({parameters}, {clip_value})", of=_KIND,
             parameters="parameters clip_value"),
        Rule("unscale_gradients", "scaler.unscale_(optimizer)", of=_KIND, note="of fsdp.LossScaler, in fp16"),
        Rule("log print init_trackers get_tracker end_training", verdict=DROP, of=_KIND,
             note="log from the training loop, on rank 0"),
        Rule("save", "torch.save({obj}, {f})", of=_KIND, parameters="obj f",
             note="on rank 0, whole tensors: fsdp.full_state_dict(model)"),
        Rule("skip_first_batches", verdict=DROP, of=_KIND,
             note="the loader's: per_rank= of fsdp.save_checkpoint holds each rank's position"),
        Rule("main_process_first local_main_process_first split_between_processes on_main_process "
             "on_local_main_process on_last_process join_uneven_inputs", verdict=DROP, of=_KIND,
             note="torch.distributed.get_rank() tells who does what"),
        Rule("free_memory clear", verdict=DROP, of=_KIND, note="`del model` frees everything"),
        Rule("optimizer_step_was_skipped distributed_type state is_last_process local_process_index use_distributed "
             "trackers gradient_accumulation_steps", verdict=DROP, of=_KIND, is_attribute=True,
             note="it belongs to Accelerate"),
        Rule("accumulate no_sync", "{model}.no_sync()", of=_KIND, parameters="model",
             note="a context, around all microbatches but the last, whose step is then made; divide the loss yourself"),
        Rule("sync_gradients", verdict=DROP, of=_KIND, is_attribute=True, note="count microbatches yourself"),
        Rule("save_state", "fsdp.save_checkpoint({output_dir=root}, model, optimizer, step=step)", of=_KIND,
             parameters="output_dir"),
        Rule("load_state", "fsdp.load_checkpoint({input_dir=root}, model, optimizer)", of=_KIND,
             parameters="input_dir"),
        Rule("save_model", "fsdp.export_safetensors(root, {save_directory=out_dir})", of=_KIND,
             parameters="model save_directory", note="of a step that fsdp.save_checkpoint saved"),
        Rule("register_for_checkpointing", verdict=DROP, of=_KIND, note="extra= of fsdp.save_checkpoint"),
        Rule("unwrap_model", "{model}", DROP, "the wrapped model is the model itself", of=_KIND, parameters="model"),
        Rule("get_state_dict", "fsdp.full_state_dict({model})", of=_KIND, parameters="model"),
        Rule("gather gather_for_metrics reduce pad_across_processes", verdict=DROP, of=_KIND, note=_COLLECTIVE),
        Rule("wait_for_everyone", "torch.distributed.barrier()", of=_KIND),
        Rule("is_main_process", "torch.distributed.get_rank() == 0", of=_KIND, is_attribute=True),
        Rule("is_local_main_process", 'os.environ["LOCAL_RANK"] == "0"', of=_KIND, is_attribute=True),
        Rule("process_index num_processes", verdict=DROP, of=_KIND, is_attribute=True,
             note="torch.distributed.get_rank() and get_world_size()"),
        Rule("device", "device", of=_KIND, is_attribute=True, note="what fsdp.init_distributed() returned"),
        Rule("autocast", verdict=DROP, of=_KIND, note='precision="bf16" in fsdp_wrap'),
        Rule("DistributedDataParallelKwargs utils.DistributedDataParallelKwargs GradScalerKwargs "
             "utils.GradScalerKwargs AutocastKwargs utils.AutocastKwargs GradientAccumulationPlugin "
             "utils.GradientAccumulationPlugin DataLoaderConfiguration utils.DataLoaderConfiguration", verdict=DROP,
             note="options are arguments of fsdp_wrap and fsdp.LossScaler"),
        Rule("InitProcessGroupKwargs utils.InitProcessGroupKwargs", "device = fsdp.init_distributed({options})",
             arguments={"backend": Argument(to="1"), "timeout": Argument(to="timeout")}),
        Rule("utils.merge_fsdp_weights", verdict=KEEP, note="it reads checkpoints of the old run"),
        Rule("utils.MegatronLMPlugin", verdict=NONE, note="there is no tensor or pipeline parallelism"),
        Rule("init_empty_weights big_modeling.init_empty_weights", 'torch.device("meta")',
             note="a context; fsdp.load_safetensors(model, folder) then fills the wrapped model"),
    ),
)  # fmt: skip

_TRAINER = "this trainer wraps the model itself: write the loop, or keep its own engine"

TRAINERS = Engine(
    "a trainer",
    ("transformers", "lightning", "pytorch_lightning", "trl", "composer"),
    (
        Rule("Trainer Seq2SeqTrainer SFTTrainer DPOTrainer RewardTrainer GRPOTrainer PPOTrainer KTOTrainer ORPOTrainer",
             verdict=NONE, note=_TRAINER),
        Rule("FSDPStrategy DDPStrategy DeepSpeedStrategy ModelParallelStrategy", verdict=NONE, note=_TRAINER),
    ),
)  # fmt: skip
