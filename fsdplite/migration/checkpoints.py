"""``torch.distributed.checkpoint``."""

from __future__ import annotations

from .rule import DROP, KEEP, Argument, Engine, Rule

__all__ = ["CHECKPOINTS"]

_SAVE_NOTE = "root is a folder for all steps; extra= holds counters and schedulers; every rank calls it"
_CONVERT = "of checkpoints of the old run make one file first (dcp_to_torch_save), and load_state_dict it"
_FULL = Argument(note="full_state_dict and cpu_offload are what fsdp.full_state_dict(model) does")

CHECKPOINTS = Engine(
    "torch.distributed.checkpoint",
    ("torch.distributed.checkpoint",),
    (
        Rule("save save_state_dict", "fsdp.save_checkpoint(root, model, optimizer, step=step)", note=_SAVE_NOTE,
             parameters="state_dict"),
        Rule("async_save", "fsdp.save_checkpoint(root, model, optimizer, step=step, background=True)", note=_SAVE_NOTE,
             parameters="state_dict"),
        Rule("load load_state_dict load_sharded_optimizer_state_dict", "report = fsdp.load_checkpoint(root, model, "
            "optimizer)",
             note=f"the state goes into the model and the optimizer; report.extra is what was saved with it; "
                  f"{_CONVERT}",
             parameters="state_dict"),
        Rule("state_dict.get_model_state_dict", "fsdp.full_state_dict({model})", parameters="model",
             arguments={"options": _FULL},
             note="where the dictionary is only handed to a save, leave it out: fsdp.save_checkpoint takes the model"),
        Rule("state_dict.get_state_dict state_dict.get_optimizer_state_dict",
             "fsdp.save_checkpoint(root, {model}, {optimizers=optimizer}, step=step)", parameters="model optimizers",
             note=_SAVE_NOTE),
        Rule("state_dict.set_model_state_dict", "{model}.load_state_dict({model_state_dict=state})",
             parameters="model model_state_dict",
             note="a wrapped model takes whole tensors, on every rank, or slices that it gave out"),
        Rule("state_dict.set_state_dict state_dict.set_optimizer_state_dict",
             "fsdp.load_checkpoint(root, {model}, {optimizers=optimizer})", parameters="model optimizers"),
        Rule("state_dict.StateDictOptions", verdict=DROP,
             note="fsdp.full_state_dict has rank0_only and dtype; fsdp.load_checkpoint has strict"),
        Rule("FileSystemWriter FileSystemReader filesystem.FileSystemWriter filesystem.FileSystemReader StorageWriter "
             "StorageReader DefaultSavePlanner DefaultLoadPlanner SavePlanner LoadPlanner "
             "_fsspec_filesystem.FsspecWriter _fsspec_filesystem.FsspecReader staging.DefaultStager", verdict=DROP,
             note="root is a folder, or a URL of an fsspec file system"),
        Rule("stateful.Stateful", verdict=DROP,
             note="fsdp.save_checkpoint takes model and optimizer, and extra= anything else that is JSON or tensors"),
        Rule("HuggingFaceStorageWriter", "fsdp.export_safetensors(root, out_dir)",
             note="of a saved step, in one process"),
        Rule("HuggingFaceStorageReader QuantizedHuggingFaceStorageReader", "fsdp.load_safetensors(model, folder)"),
        Rule("format_utils.dcp_to_torch_save", verdict=KEEP,
             note="for checkpoints of the old run: then model.load_state_dict of the file; a new one: "
                  "fsdp.export_safetensors(root, out_dir)"),
        Rule("format_utils.torch_save_to_dcp format_utils.DynamicMetaLoadPlanner "
             "format_utils.BroadcastingTorchSaveReader", "model.load_state_dict(torch.load(path))",
             note="on every rank, then fsdp.save_checkpoint"),
        Rule("CheckpointException api.CheckpointException", "fsdp.CheckpointError"),
        Rule("Metadata BytesStorageMetadata ChunkStorageMetadata TensorStorageMetadata LoadPlan ReadItem SavePlan "
             "WriteItem", verdict=DROP, note="`fsdplite ckpt inspect` shows what a checkpoint holds"),
    ),
    is_complete=True,
)  # fmt: skip
