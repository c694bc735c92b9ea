"""`fsdplite migrate`: names that come while a script runs, classes that are handed on, what engines' objects had."""

from __future__ import annotations

from .test_migrate import found, notes


def test_names_that_come_while_it_runs() -> None:
    source = """
    import importlib, torch
    F = importlib.import_module("torch.distributed.fsdp")
    a = F.FullyShardedDataParallel(a, sharding_strategy=F.ShardingStrategy(2))
    b = __import__("torch.distributed.fsdp", fromlist=["x"]).fully_shard(b)
    c = getattr(torch.nn.parallel, "DistributedDataParallel")(c)
    d = F.FullyShardedDataParallel(d, sharding_strategy=F.ShardingStrategy["NO_SHARD"])
    """
    assert [entry for entry in found(source) if "(" in entry[2]] == [
        (4, "change", "fsdp.fsdp_wrap(a, stage=2)"), (5, "change", "fsdp.fsdp_wrap(b)"),
        (6, "change", "fsdp.fsdp_wrap(c, stage=0)"), (7, "change", "fsdp.fsdp_wrap(d, stage=0)"),
    ]  # fmt: skip


def test_what_a_star_may_not_have_brought_is_not_called_unknown() -> None:
    source = """
    from torch.distributed.fsdp import *
    from mine import *
    int(helper(ShardingStrategy.NO_SHARD))
    """
    assert found(source) == [(4, "change", "stage=0")]


def test_a_class_is_a_type_or_is_called_or_derived_from() -> None:
    source = """
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.nn.parallel import DistributedDataParallel
    engines = {"fsdp": FSDP, "ddp": DistributedDataParallel}
    if isinstance(m, (FSDP, torch.nn.Linear)): wrap(m, by=FSDP)
    def f(m: FSDP | None) -> FSDP: ...
    class Mine(FSDP): ...
    """
    assert found(source) == [
        (5, "change", "fsdp.fsdp_wrap"), (5, "change", "functools.partial(fsdp.fsdp_wrap, stage=0)"),
        (6, "change", "fsdp.FSDPUnit"), (6, "change", "fsdp.fsdp_wrap"),
        (7, "change", "fsdp.FSDPUnit"), (7, "change", "fsdp.FSDPUnit"), (8, "none", ""),
    ]  # fmt: skip


def test_one_variable_may_hold_the_models_of_several_engines() -> None:
    source = """
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    if ddp: self.model = DistributedDataParallel(model)
    else: self.model = fully_shard(model)
    self.model.module
    """
    assert found(source)[-1] == (6, "drop", "self.model")


def test_processes_that_torchrun_did_not_start() -> None:
    given = "import torch.distributed as d\nd.init_process_group('gloo', rank=r, world_size=2)"
    assert "keep this line" in notes(given)
    assert "keep this line" not in notes("import torch.distributed as d\nd.init_process_group('gloo')")


def test_arguments_change_nothing_in_silence() -> None:
    source = """
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    FSDP.clip_grad_norm_(model, 1.0, norm_type=1)
    DeepSpeedCPUAdam(groups, lr=1e-4)
    FusedAdam(groups, adam_w_mode=False, weight_decay=0.1)
    FSDP(model, process_group=(inside, across))
    GatheredParameters(p)
    def settings(): return dict(train_micro_batch_size_per_gpu=1, zero_optimization=dict(stage=2))
    """
    assert found(source)[:6] == [
        (6, "keep", "model.clip_grad_norm_(1.0, norm_type=1)"),
        (7, "change", "torch.optim.AdamW(groups, lr=0.0001, weight_decay=0.0)"),
        (8, "change", "torch.optim.Adam(groups, weight_decay=0.1)"),
        (9, "change", "fsdp.fsdp_wrap(model)"),
        (10, "change", "fsdp.full_params(module)"),
        (11, "change", "fsdp.fsdp_wrap(model, policy, stage=2)"),
    ]


def test_gradients_and_weights_that_are_reduced_by_hand() -> None:
    source = """
    import torch, torch.distributed as dist
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
        dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    total = torch.norm(torch.stack([torch.norm(p.grad.detach(), 2) for p in model.parameters()]))
    total = sum(p.grad.pow(2).sum() for p in model.parameters())
    flat = torch.nn.utils.parameters_to_vector(model.parameters())
    model.require_backward_grad_sync = step % 4 == 3
    """
    norm = 'norm = model.clip_grad_norm_(float("inf"))'
    assert found(source) == [
        (4, "drop", ""), (5, "drop", ""), (7, "change", norm), (8, "change", norm),
        (9, "change", "fsdp.full_params(model)"), (10, "change", "model.set_requires_gradient_sync(step % 4 == 3)"),
    ]  # fmt: skip


def test_what_engines_objects_had_besides() -> None:
    source = """
    import deepspeed, horovod.torch as hvd
    from accelerate import Accelerator
    from lightning.fabric import Fabric
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.get_lr(), engine.global_steps
    accelerator = Accelerator()
    accelerator.log({"loss": 1})
    fabric = Fabric(strategy="fsdp")
    model, optimizer = fabric.setup(model, optimizer)
    fabric.backward(loss)
    hvd.init()
    """
    assert [(line, write) for line, _, write in found(source)][1:] == [
        (6, "scheduler.get_last_lr()"), (6, ""), (7, "device = fsdp.init_distributed()"), (8, ""),
        (9, "device = fsdp.init_distributed()"), (10, "fsdp.fsdp_wrap(model, policy)"), (11, "loss.backward()"),
        (12, ""),
    ]  # fmt: skip
    assert found(source)[-1][1] == "none" and "as many steps at once" in notes(
        "import accelerate\na = accelerate.Accelerator()\na.prepare(model)"
    )


def test_names_that_another_file_of_the_project_brings() -> None:
    source = """
    from common import *
    dist.init_process_group("gloo")
    model = DDP(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.save({"model": model.state_dict()}, "a.pt")
    """
    assert [line for line, _, _ in found(source)] == [3, 4, 5, 6]


def test_whole_tensors_of_norms_and_gradients() -> None:
    source = """
    import torch
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    norm = norm.full_tensor()
    p.grad.full_tensor()
    """
    assert [write for _, _, write in found(source)] == [
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "norm", "fsdp.full_grad(model, name)"
    ]  # fmt: skip


def test_what_is_prepared_is_the_model_wherever_it_stands() -> None:
    source = """
    from accelerate import Accelerator
    a = Accelerator()
    train_dl, model, optimizer = a.prepare(train_dl, model, optimizer)
    student_model, teacher, o = a.prepare(student_model, teacher_model, torch.optim.Adam(p))
    loader = a.prepare(loader)
    x = a.prepare(Block())
    """
    assert [write for _, _, write in found(source)][1:] == [
        "fsdp.fsdp_wrap(model, policy)",
        "fsdp.fsdp_wrap(student_model, policy); fsdp.fsdp_wrap(teacher_model, policy)",
        "",
        "fsdp.fsdp_wrap(Block(), policy)",
    ]


def test_options_that_are_put_together() -> None:
    source = """
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
    base = {"sharding_strategy": ShardingStrategy.NO_SHARD, "device_id": 0}
    FSDP(m, **{**base, "auto_wrap_policy": policy})
    FSDP(m, **(base | dict(sync_module_states=False)))
    FSDP(m, **{**base, **more()})
    FSDP(m, fsdp_auto_wrap_policy=policy)
    """
    assert [write for _, _, write in found(source)][1:] == [
        "fsdp.fsdp_wrap(m, policy, stage=0)", "fsdp.fsdp_wrap(m, stage=0, sync_params=False)",
        "fsdp.fsdp_wrap(m, stage=0)", "fsdp.fsdp_wrap(m)",
    ]  # fmt: skip
    assert "**more() is made" in notes(source) and "fsdp_auto_wrap_policy: is not known" in notes(source)


def test_states_that_are_saved_in_other_forms() -> None:
    source = """
    import torch
    torch.save(dict(model=net.state_dict(), epoch=3), "a.pt")
    torch.save(net.module.state_dict() if ddp else net.state_dict(), "b.pt")
    """
    assert [write for _, _, write in found(source)] == [
        "fsdp.save_checkpoint(root, net, step=step, extra={'epoch': 3})", "state = fsdp.full_state_dict(net)"
    ]  # fmt: skip
