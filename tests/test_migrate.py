"""`fsdplite migrate`: what it finds in scripts and configurations, and what it tells to write."""

from __future__ import annotations

import ast
import textwrap

import pytest

from fsdplite.migration.finder import find


def found(source: str) -> list[tuple[int, str, str]]:
    """(line, verdict, what to write) of each use."""
    return [(f.line, f.verdict, f.write) for f in find(ast.parse(textwrap.dedent(source)))]


def notes(source: str) -> str:
    return "\n".join(note for f in find(ast.parse(textwrap.dedent(source))) for note in f.notes)


def test_ddp() -> None:
    source = """
    import os
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def main():
        dist.init_process_group(backend="nccl")
        net = DDP(Net().cuda(), device_ids=[int(os.environ["LOCAL_RANK"])], find_unused_parameters=True)
        net.register_comm_hook(None, default_hooks.bf16_compress_hook)
        opt = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
        with net.no_sync():
            net(x).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), "net.pt")
        with net.join():
            pass
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    """
    assert found(source) == [
        (9, "keep", "device = fsdp.init_distributed('nccl')"),
        (10, "change", "fsdp.fsdp_wrap(Net().cuda(), stage=0)"),
        (11, "change", "precision=fsdp.Precision(reduce_dtype=torch.bfloat16)"),
        (12, "change", "torch.optim.AdamW(net.parameters(), lr=0.001, weight_decay=0.1)"),
        (13, "keep", ""),
        (15, "keep", "net.clip_grad_norm_(0.5)"),
        (17, "change", "state = fsdp.full_state_dict(net)"),
        (17, "drop", "net"),
        (18, "none", ""),
        (20, "none", ""),
        (20, "none", ""),
    ]
    assert "find_unused_parameters: nothing to do" in notes(source)


def test_fsdp1() -> None:
    source = """
    import functools
    import torch
    from torch.distributed.fsdp import (
        BackwardPrefetch, CPUOffload, FullStateDictConfig, FullyShardedDataParallel as FSDP, MixedPrecision,
        ShardingStrategy, StateDictType,
    )
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, Head})
    other = functools.partial(size_based_auto_wrap_policy, min_num_params=20000)
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    model = FSDP(
        model, auto_wrap_policy=policy, mixed_precision=bf16, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=CPUOffload(offload_params=True), backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        sync_module_states=True, use_orig_params=True, ignored_modules=[model.frozen],
    )
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    scaler = ShardedGradScaler(init_scale=1024.0)
    norm = model.clip_grad_norm_(1.0)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FSDP.optim_state_dict(model, optimizer)
    with FSDP.summon_full_params(model, rank0_only=True):
        pass
    units = [m for m in model.modules() if isinstance(m, FSDP)]
    """
    assert found(source) == [
        (12, "change", "fsdp.by_class(Block, Head)"),
        (13, "change", "fsdp.by_size(20000)"),
        (14, "change",
         "fsdp.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)"),
        (15, "change", 'fsdp.fsdp_wrap(model, policy, stage=2, precision=bf16, prefetch=0, '
                       'offload=fsdp.Offload(params="cpu"), ignored=[model.frozen])'),
        (20, "change", "recompute=fsdp.by_class(Block)"),
        (21, "change", "fsdp.LossScaler(init_scale=1024.0)"),
        (22, "keep", ""),
        (23, "change", "fsdp.save_checkpoint(root, model, optimizer, step=step)"),
        (24, "change", "fsdp.save_checkpoint(root, model, optimizer, step=step)"),
        (25, "change", "fsdp.full_params(model, writeback=True)"),
        (27, "change", "fsdp.FSDPUnit"),
    ]  # fmt: skip
    assert "use_orig_params: nothing to do" in notes(source)


@pytest.mark.parametrize(
    "strategy, written",
    [
        ("FULL_SHARD", "stage=3"),
        ("NO_SHARD", "stage=0"),
        ("HYBRID_SHARD", 'stage=3, mesh=init_device_mesh("cuda", (replicas, shards), '
                         'mesh_dim_names=("dp_replicate", "dp_shard"))'),
    ],
)  # fmt: skip
def test_sharding_strategies(strategy: str, written: str) -> None:
    source = f"""
    from torch.distributed import fsdp as F
    s = F.ShardingStrategy.{strategy}
    F.FullyShardedDataParallel(model, sharding_strategy=s)
    F.FullyShardedDataParallel(model, sharding_strategy=args.s)
    """
    (_, _, alone), (_, _, through_a_variable), (_, _, unknown) = found(source)
    assert alone == written and through_a_variable == f"fsdp.fsdp_wrap(model, {written})"
    assert unknown == "fsdp.fsdp_wrap(model, stage=...)" and "NO_SHARD is stage=0" in notes(source)


def test_policies() -> None:
    source = """
    import functools
    from torch.distributed.fsdp.wrap import (
        CustomPolicy, ModuleWrapPolicy, _or_policy, always_wrap_policy, lambda_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )
    functools.partial(_or_policy, policies=[
        functools.partial(lambda_auto_wrap_policy, lambda_fn=trains),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set([Block, Head])),
    ])
    ModuleWrapPolicy(CLASSES)
    CustomPolicy(lambda module: isinstance(module, (Block, Head)))
    choose(always_wrap_policy)
    """
    assert [written for _, _, written in found(source)] == [
        "fsdp.by_predicate(trains) | fsdp.by_class(Block, Head)",
        "fsdp.by_class(*CLASSES)",
        "fsdp.by_class(Block, Head)",
        "fsdp.by_size(1)",
    ]


def test_a_mesh_that_is_given_is_used() -> None:
    source = """
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    FullyShardedDataParallel(net, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    """
    assert found(source) == [(3, "change", "fsdp.fsdp_wrap(net, stage=3, mesh=mesh)")]


def test_fsdp2() -> None:
    source = """
    import torch
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, register_fsdp_forward_method
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    options = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), mesh=mesh["dp"])
    options["shard_placement_fn"] = None
    for i, block in enumerate(model.blocks):
        fully_shard(block, **options, reshard_after_forward=i < 3)
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(head, reshard_after_forward=4)
    fully_shard([model.norm, model.output], mesh=mesh)
    register_fsdp_forward_method(model, "generate")
    model.set_requires_gradient_sync(False)
    model.set_requires_gradient_sync(True, recurse=False)
    model.unshard()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    if isinstance(p, DTensor):
        w = p.full_tensor()
    parallelize_module(model, mesh["tp"], plan)
    """
    assert found(source) == [
        (8, "change", "fsdp.Precision(param_dtype=torch.bfloat16)"),
        (11, "change", "fsdp.fsdp_wrap(block, mesh=mesh['dp'], precision=fsdp.Precision(param_dtype=torch.bfloat16), "
                       "reshard_after_forward=i < 3)"),
        (12, "change", 'fsdp.fsdp_wrap(model, offload=fsdp.Offload(params="cpu", pin=False))'),
        (13, "none", "fsdp.fsdp_wrap(head)"),
        (14, "change", "fsdp.fsdp_wrap(model.norm, mesh=mesh); fsdp.fsdp_wrap(model.output, mesh=mesh)"),
        (15, "change", "forward_methods=('generate',)"),
        (16, "keep", ""),
        (17, "none", ""),
        (18, "drop", ""),
        (19, "change", "prefetch=2"),
        (20, "change", "torch.nn.Parameter"),
        (21, "change", "fsdp.full_params(module)"),
        (22, "none", ""),
    ]  # fmt: skip
    assert "reduced in fp32, not in param_dtype" in notes(source)
    assert "**options is made, or added to, when it runs" in notes(source)


def test_distributed_checkpoints() -> None:
    source = """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_state_dict
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    future = dcp.async_save({"app": state}, checkpoint_id="ckpt/3")
    dcp.load(state, storage_reader=dcp.FileSystemReader("ckpt/3"))
    set_state_dict(model, optimizer, model_state_dict=m, optim_state_dict=o)
    """
    assert found(source) == [
        (4, "change", "fsdp.full_state_dict(model)"),
        (5, "change", "fsdp.save_checkpoint(root, model, optimizer, step=step, background=True)"),
        (6, "change", "report = fsdp.load_checkpoint(root, model, optimizer)"),
        (6, "drop", ""),
        (7, "change", "fsdp.load_checkpoint(root, model, optimizer)"),
    ]


def test_deepspeed() -> None:
    source = """
    import deepspeed
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}}
    with deepspeed.zero.Init():
        model = Net()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint("out", client_state={"step": 3})
    with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        torch.nn.init.zeros_(model.head.weight)
    with deepspeed.zero.GatheredParameters(model.head.weight):
        pass
    engine.module.eval()

    def train(model_engine):
        model_engine.backward(loss)
        model_engine.step()
        deepspeed.something_new()
    other, *_ = deepspeed.initialize(args=args, model=Net(), model_parameters=params)
    y.backward(gradient)
    """
    written = 'fsdp.fsdp_wrap(model, policy, stage=3, precision="bf16", offload=fsdp.Offload(params="cpu"))'
    assert [entry for entry in found(source) if entry[0] != 3] == [
        (4, "change", 'torch.device("meta")'),
        (6, "change", written),
        (8, "change", "loss.backward()"),
        (9, "change", "optimizer.step()"),
        (10, "change", "fsdp.save_checkpoint('out', engine, optimizer, step=step, extra={'step': 3})"),
        (11, "change", "fsdp.full_params(module, writeback=True, rank0_writes=True)"),
        (13, "change", "fsdp.full_params(module)"),
        (15, "drop", "engine"),
        (18, "change", "loss.backward()"),
        (19, "change", "optimizer.step()"),
        (20, "none", ""),
        (21, "change", "fsdp.fsdp_wrap(Net(), policy, stage=...)"),
    ]
    assert found(source)[0] == (3, "change", written)


def test_megatron_fsdp() -> None:
    source = """
    import megatron_fsdp
    model, optimizer = megatron_fsdp.fully_shard(
        module=model, optimizer=optimizer, zero_dp_strategy="optim_grads", fsdp_unit_modules=[Block, "Head"],
        device_mesh=mesh, overlap_grad_reduce=True, init_model_with_meta_device=True,
    )
    megatron_fsdp.fully_shard_model(model, fsdp_unit_modules=CLASSES, tp_dim="tp")
    """
    assert found(source) == [
        (3, "change", "fsdp.fsdp_wrap(model, fsdp.by_class(Block, 'Head'), stage=2, mesh=mesh)"),
        (7, "none", "fsdp.fsdp_wrap(model, fsdp.by_class(*CLASSES))"),
    ]


def test_accelerate() -> None:
    source = """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP", transformer_cls_names_to_wrap=["Block"])
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.save_state("out")
    """
    assert found(source) == [
        (3, "change", "fsdp.fsdp_wrap(model, fsdp.by_class('Block'), stage=2)"),
        (4, "change", "device = fsdp.init_distributed()"),
        (5, "change", "fsdp.fsdp_wrap(model, policy)"),
        (6, "change", "loss.backward()"),
        (7, "change", "model.clip_grad_norm_(1.0)"),
        (8, "change", "fsdp.save_checkpoint('out', model, optimizer, step=step)"),
    ]


def test_plain_torch_that_means_something_else() -> None:
    source = """
    import torch
    from distributed_shampoo import DistributedShampoo

    class Net(torch.nn.Module):
        def _init_weights(self, m):
            m.weight.data.normal_(0.0, 0.02)

    class Rows(torch.utils.data.Dataset):
        def __init__(self, data):
            self.data = data

    optimizer = DistributedShampoo(model.parameters())
    for p, q in zip(ema.parameters(), model.parameters()):
        p.data.mul_(0.9).add_(q.data, alpha=0.1)
    for name, p in model.named_parameters():
        total += p.grad.data.norm(2).item() ** 2
    model.head.weight.data = w
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict(), "step": step}, "a.pt")
    torch.save(scheduler.state_dict(), "b.pt")
    torch.save(rows, "c.pt")
    torch.autograd.grad(loss, model.parameters())
    torch.autograd.grad(loss, x)
    torch.jit.script(model)

    @torch.jit.script
    def gelu(x):
        return x
    """
    assert found(source) == [
        (13, "none", ""),
        (15, "change", "fsdp.mark_updated(model)"),
        (17, "change", 'norm = model.clip_grad_norm_(float("inf"))'),
        (18, "change", "fsdp.mark_updated(model)"),
        (19, "change", "fsdp.save_checkpoint(root, model, optimizer, step=step, extra={'step': step})"),
        (22, "none", ""),
        (24, "none", ""),
    ]


def test_names_are_followed_through_imports() -> None:
    source = """
    import torch.distributed.fsdp
    import torch.distributed.fsdp as F
    from torch.distributed.fsdp import *
    from .local import fully_shard
    wrapper = F.FullyShardedDataParallel
    x = x.y
    a = torch.distributed.fsdp.FullyShardedDataParallel(a)
    b = wrapper(b)
    c: F.FSDPModule = CPUOffload(offload_params=False)
    fully_shard(c)
    F.something_else
    """
    assert [entry for entry in found(source) if entry[0] != 6] == [
        (8, "change", "fsdp.fsdp_wrap(a)"),
        (9, "change", "fsdp.fsdp_wrap(b)"),
        (10, "change", "fsdp.FSDPUnit"),
        (10, "change", "None"),
        (12, "none", ""),
    ]


@pytest.mark.parametrize("handed", ["checkpoint_wrapper", "partial", "functools.partial(checkpoint_wrapper)"])
def test_a_wrapper_that_is_handed_on_is_no_use_of_its_own(handed: str) -> None:
    source = f"""
    import functools
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as c
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
    partial = functools.partial(checkpoint_wrapper, checkpoint_impl=c.CheckpointImpl.NO_REENTRANT)
    c.apply_activation_checkpointing(model, checkpoint_wrapper_fn={handed}, check_fn=lambda m: isinstance(m, Layer))
    c.apply_activation_checkpointing(model, offload_wrapper, lambda m: isinstance(m, Layer))
    """
    uses = [use for use in found(source) if handed == "partial" or use[0] != 5]
    assert uses == [
        (6, "change", "recompute=fsdp.by_class(Layer)"),
        (7, "change", "recompute=fsdp.by_class(Layer)"),
        (7, "none", ""),
    ]
