"""Save on N ranks, load on M: bits, padding, empty ranks, policies, meshes. Cases K06, K07, K08, K10, K12, K14."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdplite as fsdp
from fsdplite.inspect import units
from tests.harness import MLP, assert_close, gather, here, plain, run

from .parts import fully, global_batch, same_bits, save_and_read, take_steps, wrapped
from .reader import manifest_of, read, stored_bytes


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def reference() -> nn.Module:
    torch.manual_seed(0)
    model = MLP()
    optimizer = adam(model.parameters())
    for step in range(5):
        x, y = global_batch(step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return model


def train_and_save(root, stage=3):
    model = wrapped(MLP, stage=stage)
    optimizer = adam(model.parameters())
    take_steps(model, optimizer, range(3))
    live = save_and_read(root, model, optimizer, step=3)
    return live if here.rank == 0 else None


def load_and_train(root, saved, stage=3):
    torch.manual_seed(9)
    model = fsdp.fsdp_wrap(MLP(), stage=stage)
    optimizer = adam(model.parameters())
    report = fsdp.load_checkpoint(root, model, optimizer)
    assert report.step == 3 and not report.missing and not report.unexpected
    same_bits(fully(model, optimizer), saved)
    for p in model.parameters():
        assert optimizer.state[p]["step"].item() == 3.0
    take_steps(model, optimizer, range(3, 5))
    found = gather(model)
    for name, value in reference().named_parameters():
        assert_close(found[name], value.detach(), what=name)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_K06_save_on_n_load_on_m(tmp_path, n):
    saved = run(n, train_and_save, str(tmp_path))[0]
    for m in (1, 2, 3, 4):
        run(m, load_and_train, str(tmp_path), saved)


def test_K06_stages(tmp_path):
    for stage in range(4):
        root = str(tmp_path / str(stage))
        saved = run(2, train_and_save, root, stage)[0]
        for other in range(4):
            run(2, load_and_train, root, saved, other)


class OddShapes(nn.Module):
    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        for number, shape in enumerate([(1, 17), (3,), (), (0, 5)]):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape) + fill))

    def forward(self, x):
        return sum((p * x).sum() for p in self.parameters())


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1))

    def forward(self, x):
        return (self.w * x).sum()


def save_trained(root, build):
    model = wrapped(build)
    optimizer = adam(model.parameters())
    model(torch.tensor(2.0)).backward()
    optimizer.step()
    live = save_and_read(root, model, optimizer, step=1)
    return live if here.rank == 0 else None


def load_bits(root, build, saved, **options):
    torch.manual_seed(5)
    model = fsdp.fsdp_wrap(build(), **options)
    optimizer = adam(model.parameters())
    fsdp.load_checkpoint(root, model, optimizer)
    same_bits(fully(model, optimizer), saved)


@pytest.mark.parametrize("build", [OddShapes, One])
def test_K07_ranks_that_own_nothing(tmp_path, build):
    saved = run(4, save_trained, str(tmp_path), build)[0]
    if build is OddShapes:
        shapes = {n: t["shape"] for n, t in manifest_of(tmp_path / "step-1")["tensors"].items() if "/" not in n}
        assert shapes == {"p0": [1, 17], "p1": [3], "p2": [], "p3": [0, 5]}
    for m in (2, 1, 3):
        run(m, load_bits, str(tmp_path), build, saved)


class Padded(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 5))


def gaps_of(model):
    """Views of this rank's padding. Moments are of the users' slices and have none."""
    (flat,) = units(model)[0].flats
    start, stop = flat.layout.shard_range(here.rank)
    places = [(max(low, start) - start, min(high, stop) - start) for low, high in flat.layout.gaps()]
    return [flat.masters.vector[low:high] for low, high in places if low < high]


def save_with_poisoned_padding(root, step):
    """Trains and saves step 1; later steps load the one before."""
    model = wrapped(Padded)
    optimizer = adam(model.parameters())
    if step == 1:
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
    else:
        fsdp.load_checkpoint(root, model, optimizer, step=step - 1)
        assert not any(gap.any() for gap in gaps_of(model))
    for gap in gaps_of(model):
        gap.fill_(float("nan"))
    save_and_read(root, model, optimizer, step=step)
    return sum(gap.numel() for gap in gaps_of(model))


def test_K08_padding_is_never_stored(tmp_path):
    root = str(tmp_path)
    assert sum(run(3, save_with_poisoned_padding, root, 1)) > 0
    assert sum(run(2, save_with_poisoned_padding, root, 2)) >= 0
    for step in (1, 2):
        folder = tmp_path / f"step-{step}"
        assert stored_bytes(folder) - stored_bytes(folder, "optimizer/") == 160
        assert stored_bytes(folder, "optimizer/") == 320
        assert not any(t.isnan().any() for t in read(folder).values())
    run(1, load_bits, root, Padded, read(tmp_path / "step-1"))


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[nn.Linear(5, 5) for _ in range(4)])


POLICIES = {"layers": nn.Linear, "root": None}


def save_with_policy(root, policy, step):
    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(Layers(), fsdp.by_class(nn.Linear) if policy == "layers" else None)
    optimizer = adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    live = save_and_read(root, model, optimizer, step=step)
    return live if here.rank == 0 else None


def load_plain(root, saved, build):
    torch.manual_seed(5)
    model = build()
    optimizer = adam(model.parameters())
    fsdp.load_checkpoint(root, model, optimizer)
    found = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer/{name}/{key}"] = optimizer.state[p][key]
    same_bits(found, saved)


def load_policy(root, saved, policy):
    torch.manual_seed(5)
    model = fsdp.fsdp_wrap(Layers(), fsdp.by_class(nn.Linear) if policy == "layers" else None)
    optimizer = adam(model.parameters())
    fsdp.load_checkpoint(root, model, optimizer)
    same_bits(fully(model, optimizer), saved)


def test_K10_the_policy_leaves_no_trace(tmp_path):
    keys = []
    for policy in POLICIES:
        root = str(tmp_path / policy)
        saved = run(2, save_with_policy, root, policy, 1)[0]
        tensors = manifest_of(tmp_path / policy / "step-1")["tensors"]
        keys.append({name: (t["dtype"], t["shape"]) for name, t in tensors.items()})
        for other in POLICIES:
            run(2, load_policy, root, saved, other)
        run(2, load_plain, root, saved, Layers)
        run(1, load_plain, root, saved, Layers, group=False)
    assert keys[0] == keys[1]


def save_alone(root):
    model = MLP()
    optimizer = adam(model.parameters())
    for step in range(2):
        x, y = global_batch(step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    handle = fsdp.save_checkpoint(root, model, optimizer, step=1)
    assert sorted(os.listdir(handle.path)) == ["manifest.json", "rank-0-of-1.safetensors"]
    return read(handle.path)


def load_and_save_again(root, saved):
    torch.manual_seed(5)
    model = fsdp.fsdp_wrap(MLP())
    optimizer = adam(model.parameters())
    fsdp.load_checkpoint(root, model, optimizer)
    same_bits(fully(model, optimizer), saved)
    save_and_read(root, model, optimizer, step=2)


def test_K12_one_rank_is_not_special(tmp_path):
    saved = run(1, save_alone, str(tmp_path), group=False)[0]
    run(3, load_and_save_again, str(tmp_path), saved)
    run(1, load_plain, str(tmp_path), saved, MLP, group=False)


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ps = nn.ParameterList([nn.Parameter(torch.randn(1000)) for _ in range(4)])

    def forward(self, x):
        return sum((p * x).sum() for p in self.ps)


def mesh_of(shape):
    if shape is None:
        return None
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def save_on_mesh(root, stage, shape):
    model = wrapped(Four, stage=stage, mesh=mesh_of(shape))
    live = save_and_read(root, model, step=1)
    return live if here.rank == 0 else None


def load_on_mesh(root, saved, stage, shape):
    torch.manual_seed(5)
    model = fsdp.fsdp_wrap(Four(), stage=stage, mesh=mesh_of(shape))
    fsdp.load_checkpoint(root, model)
    same_bits(gather(model), saved)


@pytest.mark.parametrize(
    "stage,shape,least", [(3, (2, 2), 2000), (0, None, 2000), (2, (2, 2), 2000), (0, (2, 2), 2000)]
)
def test_K14_replicas_write_each_byte_once(tmp_path, stage, shape, least):
    saved = run(4, save_on_mesh, str(tmp_path), stage, shape)[0]
    folder = tmp_path / "step-1"
    assert stored_bytes(folder) == 16_000
    manifest = manifest_of(folder)
    written = [0] * 4
    for tensor in manifest["tensors"].values():
        for file, _, count in tensor["ranges"]:
            written[file] += 4 * count
    assert min(written) >= least and sum(written) == 16_000
    run(2, load_on_mesh, str(tmp_path), saved, 3, None)
    run(4, load_on_mesh, str(tmp_path), saved, 3, None)
    run(4, load_on_mesh, str(tmp_path), saved, 3, (2, 2))


def save_part_of_a_world(root):
    """Ranks 0 and 2 of three train together; rank 1 has nothing to do with it."""
    import torch.distributed as dist

    group = dist.new_group([0, 2])
    if here.rank == 1:
        return None
    torch.manual_seed(0)
    model = fsdp.fsdp_wrap(Four(), mesh=group)
    fsdp.save_checkpoint(root, model, step=1)
    torch.manual_seed(1)
    other = fsdp.fsdp_wrap(Four(), mesh=group)
    fsdp.load_checkpoint(root, other)
    assert all(torch.equal(plain(a), plain(b)) for a, b in zip(model.parameters(), other.parameters()))
    return None


def test_a_group_of_some_ranks_saves_and_loads(tmp_path):
    run(3, save_part_of_a_world, str(tmp_path))
    assert manifest_of(tmp_path / "step-1")["world_size"] == 2
    torch.manual_seed(0)
    same_bits(read(tmp_path / "step-1"), {name: p.detach() for name, p in Four().named_parameters()})
