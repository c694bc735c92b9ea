"""Lightning Fabric, and engines that the command knows by name only."""

from __future__ import annotations

from .rule import DROP, KEEP, NONE, Argument, Engine, Rule

__all__ = ["FABRIC", "OTHER_ENGINES"]

_KIND = "Fabric"

FABRIC = Engine(
    "Fabric",
    ("lightning", "lightning_fabric"),
    (
        Rule(
            "Fabric",
            "device = fsdp.init_distributed()",
            arguments={
                "strategy": Argument(note="options are arguments of fsdp_wrap: stage=0 is DDP, 3 is FSDP"),
                "precision": Argument(note='precision="bf16" or "fp16" in fsdp_wrap; "fp16" with fsdp.LossScaler'),
                "loggers": Argument(note="log from the training loop, on rank 0"),
            },
            note="wrap the model yourself, and start it with torchrun",
            makes=_KIND,
        ),
        Rule("setup setup_module", "fsdp.fsdp_wrap({module}, policy)", of=_KIND, parameters="module",
             note="the model only: the optimizer stays plain"),
        Rule("setup_optimizers setup_dataloaders", verdict=DROP, of=_KIND,
             note="they stay plain; the loader takes a DistributedSampler, and batches go to the device by hand"),
        Rule("backward", "{tensor}.backward()", of=_KIND, parameters="tensor"),
        Rule("clip_gradients", "{module}.clip_grad_norm_({max_norm})", of=_KIND,
             parameters="module optimizer clip_val max_norm",
             arguments={"clip_val": Argument(
                 note="values are clipped by torch.nn.utils.clip_grad_value_(model.parameters(), clip_val)")}),
        Rule("no_backward_sync", "{module}.no_sync()", of=_KIND, parameters="module enabled"),
        Rule("save", "fsdp.save_checkpoint({path=root}, model, optimizer, step=step)", of=_KIND,
             parameters="path state",
             note="root is a folder for all steps; extra= holds counters and schedulers; every rank calls it"),
        Rule("load load_raw", "report = fsdp.load_checkpoint({path=root}, model, optimizer)", of=_KIND,
             parameters="path state", note="report.extra is what was saved with it"),
        Rule("init_module init_tensor", 'torch.device("meta")', of=_KIND,
             note="a context, around the construction; fsdp.fsdp_wrap then makes units real one at a time"),
        Rule("autocast", verdict=DROP, of=_KIND, note='precision="bf16" in fsdp_wrap'),
        Rule("barrier", "torch.distributed.barrier()", of=_KIND),
        Rule("all_gather all_reduce broadcast", verdict=DROP, of=_KIND, note="torch.distributed has the collective"),
        Rule("device", "device", of=_KIND, is_attribute=True, note="what fsdp.init_distributed() returned"),
        Rule("is_global_zero", "torch.distributed.get_rank() == 0", of=_KIND, is_attribute=True),
        Rule("global_rank local_rank world_size node_rank", verdict=DROP, of=_KIND, is_attribute=True,
             note="torch.distributed.get_rank() and get_world_size()"),
        Rule("launch print log log_dict call seed_everything to_device rank_zero_first", verdict=DROP, of=_KIND,
             note="plain Python, after fsdp.init_distributed()"),
    ),
)  # fmt: skip

OTHER_ENGINES = Engine(
    "another engine",
    ("fairscale", "horovod", "apex.parallel", "apex.amp", "apex.contrib.optimizers", "colossalai", "bagua", "hivemind",
     "torch_xla.distributed", "torchtitan.distributed"),
    (
        Rule("parallel.convert_syncbn_model", "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)", KEEP),
        Rule("amp.initialize", verdict=NONE,
             note='mixed precision is precision="bf16" or "fp16" in fsdp_wrap, "fp16" with fsdp.LossScaler'),
    ),
    is_complete=True,
)  # fmt: skip
