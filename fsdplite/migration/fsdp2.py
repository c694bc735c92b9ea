"""``torch.distributed.fsdp.fully_shard``, and the DTensors it leaves."""

from __future__ import annotations

from .fsdp1 import REDUCE_NOTE
from .rule import ANY, DROP, KEEP, NONE, UNIT, Argument, Engine, Rule

__all__ = ["DTENSOR", "FSDP2", "OTHER_PARALLELISM"]

_PREFETCH = Rule(
    "set_modules_to_forward_prefetch set_modules_to_backward_prefetch",
    "prefetch={modules!count=1}",
    note="an option of fsdp_wrap: the order of units is recorded, so only their number is said",
    parameters="modules",
    of=ANY,
)
_TUNING = (
    "set_is_last_backward reset_iter_state set_requires_all_reduce set_post_optim_event set_unshard_in_backward "
    "set_allocate_memory_from_process_group_for_comm set_force_sum_reduction_for_comms set_symm_mem_for_comm "
    "set_reduce_scatter_unused_params set_reduce_scatter_max_input_buffers set_separate_reduce_scatter_group"
)

FSDP2 = Engine(
    "FSDP2",
    ("torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed._composable.fsdp"),
    (
        Rule(
            "fully_shard",
            "fsdp.fsdp_wrap({module}{options})",
            parameters="module",
            knows_all=True,
            arguments={
                "mesh": Argument(to="mesh"),
                "reshard_after_forward": Argument(to="reshard_after_forward",
                                                  number="parameters are freed or kept, not sharded over fewer ranks"),
                "mp_policy": Argument(to="precision"),
                "offload_policy": Argument(to="offload"),
                "ignored_params": Argument(to="ignored"),
                "shard_placement_fn": Argument(note="leave it out: a unit is sharded as one flat vector, no dimension "
                                                    "counts"),
                "dp_mesh_dims": Argument(note="leave it out: mesh is the 1-D or 2-D mesh of data parallelism"),
            },
            note="the loop over blocks may stay, or becomes one call: fsdp.fsdp_wrap(model, fsdp.by_class(Block))",
            makes="FSDP2 model",
        ),
        Rule(
            "MixedPrecisionPolicy",
            "fsdp.Precision({options})",
            parameters="param_dtype reduce_dtype output_dtype cast_forward_inputs",
            knows_all=True,
            arguments={
                "param_dtype": Argument(to="param_dtype"),
                "reduce_dtype": Argument(to="reduce_dtype", absent_note=REDUCE_NOTE),
                "output_dtype": Argument(to="output_dtype"),
                "cast_forward_inputs": Argument(to="cast_forward_inputs"),
            },
        ),
        Rule("CPUOffloadPolicy", 'fsdp.Offload(params="cpu"{options})', parameters="pin_memory",
             arguments={"pin_memory": Argument(to="pin")}),
        Rule("OffloadPolicy", "None"),
        Rule("register_fsdp_forward_method", "forward_methods=({method_name},)", parameters="module method_name",
             note="an option of fsdp_wrap, for the module that has the method"),
        Rule("FSDPModule", UNIT),
        Rule("UnshardHandle share_comm_ctx", verdict=DROP, note="gathers are started ahead by prefetch="),
        Rule("DataParallelMeshDims", verdict=DROP, note="mesh= is the 1-D or 2-D mesh of data parallelism"),
        Rule("replicate", "fsdp.fsdp_wrap({module}{options}, stage=0)", parameters="module",
             arguments={"device_mesh": Argument(to="mesh"), "process_group": Argument(to="mesh")}, makes="FSDP2 model"),
        Rule("set_requires_gradient_sync", verdict=KEEP, note="works the same, at every stage", of=ANY,
             parameters="requires_gradient_sync",
             arguments={"recurse": Argument(none="it is for the unit and all units inside it", harmless=("True",))}),
        Rule("to_empty", verdict=DROP, of=ANY,
             note="a wrapped model is not emptied: units built on the meta device are made real one at a time, by "
                  "reset_parameters or by what is loaded into them"),
        Rule("set_gradient_divide_factor", verdict=KEEP, note="works the same; None is the mean over ranks", of=ANY),
        Rule("set_reduce_scatter_divide_factor", "{self}.set_gradient_divide_factor({factor})", parameters="factor",
             of=ANY),
        Rule("set_reshard_after_forward", "reshard_after_forward={reshard_after_forward}", of=ANY,
             parameters="reshard_after_forward", note="an option of fsdp_wrap, when the unit is made"),
        Rule("set_reshard_after_backward", "stage=2", of=ANY,
             note="stages 0 to 2 keep the parameters from one step to the next"),
        Rule("unshard reshard", verdict=DROP, of=ANY,
             note="units are gathered and freed by themselves, prefetch= ahead; to look at weights: with "
                  "fsdp.full_params(module):"),
        _PREFETCH,
        Rule(_TUNING, verdict=DROP, note="nothing to set: it changes traffic or memory, and no result", of=ANY),
        Rule("set_all_reduce_hook set_custom_all_gather set_custom_reduce_scatter", verdict=NONE,
             note="collectives cannot be replaced", of=ANY),
    ),
)  # fmt: skip

_PARALLEL = "fsdplite is data parallel: there is no tensor, pipeline, context or expert parallelism"

DTENSOR = Engine(
    "DTensor",
    ("torch.distributed.tensor", "torch.distributed._tensor"),
    (
        Rule("full_tensor", "fsdp.full_params(module)", of=ANY,
             by_receiver={r"\.grad$": "fsdp.full_grad(model, name)", "norm": "{self}"},
             note="a context: inside it parameters are whole, in the dtype of the computation (with writeback=True the "
                  "fp32 masters); a whole model in host memory: "
                  "fsdp.full_state_dict(model); a gradient: fsdp.full_grad(model, name); the norm that clipping "
                  "returns is plain"),
        Rule("to_local", "{self}.detach()", of=ANY,
             note="a parameter is this rank's slice already; p.full_shape is the whole's"),
        Rule("DTensor", "torch.nn.Parameter", note="parameters stay the ones you made, each holding this rank's slice"),
        Rule("distribute_tensor", "model.load_state_dict(full_state)",
             note="a wrapped model takes whole tensors, on every rank; fsdp.load_safetensors(model, folder) reads only "
                  "what a rank needs"),
        Rule("Shard Replicate Partial Placement", verdict=DROP, note="a unit is sharded as one flat vector"),
        Rule("init_device_mesh DeviceMesh", verdict=KEEP, note="mesh= takes it"),
        Rule("redistribute", verdict=NONE, note=_PARALLEL, of=ANY),
        Rule("DTensor.from_local distribute_module zeros ones empty rand randn full experimental.context_parallel",
             verdict=NONE, note=_PARALLEL),
        Rule("parallel.parallelize_module parallel.ColwiseParallel parallel.RowwiseParallel parallel.SequenceParallel "
             "parallel.PrepareModuleInput parallel.PrepareModuleOutput parallel.PrepareModuleInputOutput "
             "parallel.ParallelStyle parallel.loss_parallel", verdict=NONE, note=_PARALLEL),
    ),
    is_complete=True,
)  # fmt: skip

OTHER_PARALLELISM = Engine(
    "other parallelism",
    ("torch.distributed.pipelining", "torch.distributed.rpc"),
    (
        Rule("pipeline PipelineStage SplitPoint ScheduleGPipe Schedule1F1B ScheduleInterleaved1F1B pipe_split",
             verdict=NONE, note=_PARALLEL),
        Rule("init_rpc", verdict=NONE, note=_PARALLEL),
    ),
    is_complete=True,
)  # fmt: skip
