"""Values that arrive as what they were, or a refusal by name before anything is written."""

from __future__ import annotations

import collections
import enum
import json
import struct
import zlib

import pytest
import torch
from torch import nn

import fsdplite as fsdp
from fsdplite.errors import ConfigError

from .parts import filled


class Lazy(nn.Module):
    """Buffers whose memory holds other values than they have."""

    def __init__(self, *values: complex) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        number = torch.tensor(values, dtype=torch.complex64)
        self.register_buffer("conjugate", number.conj())
        self.register_buffer("negative", number.conj().imag)


def test_views_by_conj_are_stored_and_loaded_by_their_values(tmp_path):
    saved = Lazy(1 + 2j, 3 - 4j)
    assert saved.conjugate.is_conj() and saved.negative.is_neg()
    extra = {"c": saved.conjugate, "n": saved.negative}
    fsdp.save_checkpoint(tmp_path, saved, step=1, extra=extra, per_rank=extra)
    plain, lazy = Lazy(0, 0), Lazy(5 + 5j, 6 + 6j)
    plain.conjugate, plain.negative = torch.zeros(2, dtype=torch.complex64), torch.zeros(2)
    for model in (plain, lazy):
        report = fsdp.load_checkpoint(tmp_path, model)
        assert model.conjugate.tolist() == [1 - 2j, 3 + 4j]
        assert model.negative.tolist() == [-2, 4]
        for values in (report.extra, report.per_rank):
            assert values["c"].tolist() == [1 - 2j, 3 + 4j]
            assert values["n"].tolist() == [-2, 4]


class Strided(nn.Module):
    """One-dimensional tensors whose elements are not side by side in memory."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(start, start + 8)[::2])
        self.register_buffer("column", torch.arange(start, start + 8).view(4, 2)[:, 1])


def test_elements_apart_in_memory_are_stored_and_loaded_by_their_values(tmp_path):
    saved = Strided(0.0)
    optimizer = torch.optim.SGD(saved.parameters(), lr=1.0)
    optimizer.state[saved.weight]["momentum_buffer"] = saved.column
    values = {"strided": saved.column, "expanded": torch.ones(1).expand(3)}
    fsdp.save_checkpoint(tmp_path, saved, optimizer, step=1, extra=values, per_rank=values)
    model = Strided(100.0)
    resumed = torch.optim.SGD(model.parameters(), lr=1.0)
    report = fsdp.load_checkpoint(tmp_path, model, resumed)
    assert model.weight.tolist() == [0, 2, 4, 6]
    assert model.column.tolist() == resumed.state[model.weight]["momentum_buffer"].tolist() == [1, 3, 5, 7]
    for got in (report.extra, report.per_rank):
        assert got["strided"].tolist() == [1, 3, 5, 7] and got["expanded"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("through", ["checkpoint", "safetensors"])
def test_a_load_between_forward_and_backward_is_noticed(tmp_path, through):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fsdp.save_checkpoint(tmp_path / "root", model, step=1)
    fsdp.export_safetensors(tmp_path / "root", tmp_path / "folder")
    loss = model(torch.ones(1, 2)).sum()
    if through == "checkpoint":
        fsdp.load_checkpoint(tmp_path / "root", model)
    else:
        fsdp.load_safetensors(model, tmp_path / "folder")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def trained() -> tuple[nn.Linear, torch.optim.Adam]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def edit(step: str, change) -> None:
    """Change the manifest and make its checksum right again."""
    path = f"{step}/manifest.json"
    with open(path) as file:
        body = json.load(file)
    body.pop("crc32")
    change(body)
    rest = b'", ' + json.dumps(body).encode()[1:] + b"\n"
    found = zlib.crc32(b'{"crc32": "' + b"0" * 8 + rest)
    with open(path, "wb") as file:
        file.write(b'{"crc32": "' + f"{found:08x}".encode() + rest)


def test_settings_never_replace_the_members_of_a_group(tmp_path):
    model, optimizer = trained()
    fsdp.save_checkpoint(tmp_path, model, optimizer, step=1)
    edit(
        f"{tmp_path}/step-1",
        lambda body: body["optimizer"]["groups"][0]["settings"].update(params=[], param_names=[], eps=0.5),
    )
    fsdp.load_checkpoint(tmp_path, model, optimizer)
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    assert "param_names" not in group and group["eps"] == 0.5


def test_a_load_in_inference_mode_makes_ordinary_tensors(tmp_path):
    model, optimizer = trained()
    values = {"t": torch.ones(2)}
    fsdp.save_checkpoint(tmp_path, model, optimizer, step=1, extra=values, per_rank=values)
    other = nn.Linear(3, 2)
    resumed = torch.optim.Adam(other.parameters(), lr=torch.tensor(0.0))
    with torch.inference_mode():
        report = fsdp.load_checkpoint(tmp_path, other, resumed)
    made = [value for state in resumed.state.values() for value in state.values()]
    assert len(made) == 6
    assert not any(t.is_inference() for t in [*made, resumed.param_groups[0]["lr"]])
    assert not report.extra["t"].is_inference() and not report.per_rank["t"].is_inference()
    for one, its in ((model, optimizer), (other, resumed)):
        one(torch.ones(1, 3)).sum().backward()
        its.param_groups[0]["lr"].mul_(0.5)
        its.step()
        its.zero_grad()
    assert [s["step"].item() for s in resumed.state.values()] == [2, 2]


@pytest.mark.parametrize("where", ["extra", "per_rank", "settings", "scalar"])
@pytest.mark.parametrize(
    "bad", [{"__dict__": [[[1], 2]]}, {"__tensor__": "99"}, {"__tensor__": [1]}, {"__float__": "x"}, {"__tuple__": 3}]
)
def test_values_that_no_save_writes_are_refused_before_anything_changes(tmp_path, monkeypatch, where, bad):
    model, optimizer = trained()
    if where == "per_rank":
        with monkeypatch.context() as patch:
            patch.setattr("fsdplite.checkpoint.values.encode_value", lambda value, *_: value)
            fsdp.save_checkpoint(tmp_path, model, optimizer, step=1, per_rank={"mine": bad})
    else:
        fsdp.save_checkpoint(tmp_path, model, optimizer, step=1, extra=1)
    if where == "extra":
        edit(f"{tmp_path}/step-1", lambda body: body.update(extra={"mine": bad}))
    if where == "settings":
        edit(f"{tmp_path}/step-1", lambda body: body["optimizer"]["groups"][0]["settings"].update(mine=bad))
    if where == "scalar":
        edit(f"{tmp_path}/step-1", lambda body: body["optimizer"]["scalars"]["bias"].update(mine={"value": bad}))
    other = nn.Linear(3, 2)
    before = [p.detach().clone() for p in other.parameters()]
    resumed = torch.optim.Adam(other.parameters())
    with pytest.raises(fsdp.CheckpointError, match="'?mine'?.* cannot be read"):
        fsdp.load_checkpoint(tmp_path, other, resumed)
    assert all(map(torch.equal, before, other.parameters())) and not resumed.state


class Overlapping(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.register_buffer("expanded", torch.full((1,), value).expand(4))
        self.register_buffer("windows", torch.full((6,), value).unfold(0, 4, 1))
        self.register_buffer("strided", torch.full((4, 6), value).t()[::2, :2])
        self.register_buffer("woven", torch.full((6,), value).as_strided((2, 2), (2, 3)))


def test_elements_that_share_memory_are_refused_by_name_before_anything_changes(tmp_path):
    fsdp.save_checkpoint(tmp_path, Overlapping(1.0), step=1)
    model = Overlapping(2.0)
    with pytest.raises(fsdp.CheckpointError) as caught:
        fsdp.load_checkpoint(tmp_path, model)
    assert "'expanded'" in str(caught.value) and "'windows'" in str(caught.value)
    assert "'strided'" not in str(caught.value) and "'woven'" not in str(caught.value)
    assert all((t == 2).all() for t in model.state_dict().values())
    model.expanded, model.windows = model.expanded.clone(), model.windows.clone()
    fsdp.load_checkpoint(tmp_path, model)
    assert all((t == 1).all() for t in model.state_dict().values())


@pytest.mark.parametrize("argument", ["extra", "per_rank"])
@pytest.mark.parametrize(
    "bad",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        lambda: torch.ones(1, device="meta"),
        lambda: torch.tensor(1j, dtype=torch.complex128),
        lambda: 10**5000,
        lambda: b"text",
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_what_cannot_be_stored_is_refused_by_its_key(tmp_path, argument, bad):
    with pytest.raises(fsdp.CheckpointError, match=rf"{argument}\['a'\]\[1\]"):
        fsdp.save_checkpoint(tmp_path, nn.Linear(1, 1), step=1, **{argument: {"a": [0, bad()]}})
    assert fsdp.latest_step(tmp_path) is None


def nest(depth, wrap):
    value = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("argument", ["extra", "per_rank"])
@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}])
def test_what_is_nested_as_deep_as_a_save_takes_it_can_be_loaded(tmp_path, argument, wrap):
    fsdp.save_checkpoint(tmp_path, nn.Linear(1, 1), step=1, **{argument: nest(100, wrap)})
    assert getattr(fsdp.load_checkpoint(tmp_path, nn.Linear(1, 1)), argument) == nest(100, wrap)
    endless = [1]
    endless.append(endless)
    for value in (nest(101, wrap), nest(400, wrap), endless):
        with pytest.raises(fsdp.CheckpointError, match=rf"{argument}.* cannot be stored"):
            fsdp.save_checkpoint(tmp_path, nn.Linear(1, 1), step=2, **{argument: value})
    assert fsdp.latest_step(tmp_path) == 1


def test_a_slice_of_a_model_is_no_value(tmp_path):
    average = fsdp.fsdp_wrap(nn.Linear(3, 2))
    for argument in ("extra", "per_rank"):
        with pytest.raises(fsdp.CheckpointError, match="(?s)one rank's slice.*ModuleDict"):
            fsdp.save_checkpoint(tmp_path, nn.Linear(1, 1), step=1, **{argument: {"ema": average.state_dict()}})
    assert fsdp.latest_step(tmp_path) is None


def test_subclasses_come_back_as_what_they_are_made_of(tmp_path):
    class Level(enum.IntEnum):
        HIGH = 3

    pair = collections.namedtuple("pair", "left right")
    values = [collections.OrderedDict(b=1, a=2), collections.Counter([5]), pair(1, 2), Level.HIGH]
    model = nn.Linear(1, 1)
    fsdp.save_checkpoint(tmp_path, model, step=1, extra=values)
    loaded = fsdp.load_checkpoint(tmp_path, model).extra
    assert loaded == [{"b": 1, "a": 2}, {5: 1}, (1, 2), 3]
    assert [type(value) for value in loaded] == [dict, dict, tuple, int]


def test_keys_of_optimizer_states_may_have_slashes(tmp_path):
    model, optimizer = trained()
    for number, state in enumerate(optimizer.state.values()):
        state["a/b"] = torch.full_like(state["exp_avg"], number + 1)
    fsdp.save_checkpoint(tmp_path, model, optimizer, step=1)
    resumed = torch.optim.Adam(model.parameters())
    fsdp.load_checkpoint(tmp_path, model, resumed)
    assert [s["a/b"].unique().item() for s in resumed.state.values()] == [1, 2]


def test_states_whose_names_would_be_one_are_refused(tmp_path):
    model = nn.ParameterDict({"p": nn.Parameter(torch.ones(2)), "p/q": nn.Parameter(torch.ones(2))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model["p"]]["q/r"] = torch.ones(2)
    optimizer.state[model["p/q"]]["r"] = torch.zeros(2)
    with pytest.raises(fsdp.CheckpointError, match="'q/r' of 'p'"):
        fsdp.save_checkpoint(tmp_path, model, optimizer, step=1)


class OfItsOwn(torch.Tensor):
    """A tensor whose memory is elsewhere: bytes read from its own are a crash."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return OfItsOwn(function(*(a.inner if isinstance(a, OfItsOwn) else a for a in args), **(kwargs or {})))


@pytest.mark.parametrize(
    "odd, says",
    [(lambda: OfItsOwn(torch.ones(2, 2)), "a OfItsOwn"), (lambda: torch.ones(2, 2).to_sparse(), "sparse_coo"),
     (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "nested"),
     (nn.parameter.UninitializedBuffer, "without a shape"), (nn.parameter.UninitializedParameter, "without a shape")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_tensors_whose_bytes_are_not_their_values_are_refused_by_name(tmp_path, odd, says):
    model = nn.Linear(2, 2)
    tensor = odd()
    if isinstance(tensor, nn.Parameter) or nn.parameter.is_lazy(tensor) and "Parameter" in type(tensor).__name__:
        model.odd = tensor
    else:
        model.register_buffer("odd", tensor)
    with pytest.raises(fsdp.CheckpointError, match=rf"(?s)'odd' cannot be stored.*{says}"):
        fsdp.save_checkpoint(tmp_path, model, step=1)
    assert fsdp.latest_step(tmp_path) is None


def test_optimizer_states_that_would_be_lost_are_refused_by_name(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"d": 3.0}
    with pytest.raises(fsdp.CheckpointError, match=r"state\['global'\] of the optimizer belongs to no parameter"):
        fsdp.save_checkpoint(tmp_path, model, optimizer, step=1)
    del optimizer.state["global"]
    optimizer.state[model.weight]["quantized"] = OfItsOwn(torch.ones(2, 2))
    with pytest.raises(fsdp.CheckpointError, match="(?s)'quantized' of 'weight' cannot be stored.*a OfItsOwn"):
        fsdp.save_checkpoint(tmp_path, model, optimizer, step=1)
    assert fsdp.latest_step(tmp_path) is None


@pytest.mark.parametrize("background", [False, True])
def test_memory_of_the_host_is_not_where_new_tensors_go_by_default(tmp_path, background):
    """torch.set_default_device and a device as a context redirect every factory: here to where there are no bytes."""
    model, optimizer = filled(1.0, wrap=False)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    own, extra = torch.tensor([7]), torch.tensor([8])
    with torch.device("meta"):
        handle = fsdp.save_checkpoint(
            tmp_path, model, optimizer, step=1, extra=extra, per_rank=own, background=background
        )
        handle.wait()
    other, its = filled(2.0, dtype=torch.float64, wrap=False)
    with torch.device("meta"):
        report = fsdp.load_checkpoint(tmp_path, other, its)
        fsdp.export_safetensors(tmp_path, tmp_path / "out", dtype="bf16")
    assert set(other.w.tolist()) == {1.0} and its.param_groups[0]["lr"].item() == 0.5
    assert {k: v.unique().tolist() for k, v in its.state[other.w].items()} == {
        "step": [3.0], "exp_avg": [1.0], "exp_avg_sq": [1.0]
    }  # fmt: skip
    assert report.extra.item() == 8 and report.per_rank.item() == 7


@pytest.mark.parametrize("name", ["__metadata__", "half of a pair \udc80"])
def test_names_that_no_file_can_hold_are_refused_by_name(tmp_path, name):
    model = nn.Linear(1, 1)
    model.register_parameter(name, nn.Parameter(torch.ones(2)))
    with pytest.raises(fsdp.CheckpointError) as caught:
        fsdp.save_checkpoint(tmp_path, model, step=1)
    assert f"cannot hold a tensor that is called {name!r}" in str(caught.value)
    fsdp.save_checkpoint(tmp_path, nn.Linear(1, 1), step=2, extra={name: 1}, per_rank={name: torch.ones(1)})
    report = fsdp.load_checkpoint(tmp_path, nn.Linear(1, 1))
    assert report.extra == {name: 1} and report.per_rank[name].item() == 1


def test_metadata_of_somebody_else_is_left_alone(tmp_path):
    model = nn.Linear(3, 2)
    for metadata in ({"crc32": "deadbeef"}, {"chunk_bytes": "1", "format": "pt"}):
        write_safetensors(model.state_dict(), f"{tmp_path}/model.safetensors", metadata)
        other = nn.Linear(3, 2)
        fsdp.load_safetensors(other, tmp_path)
        assert torch.equal(other.weight, model.weight)


def test_an_index_that_lists_no_file_names(tmp_path):
    write_safetensors(nn.Linear(3, 2).state_dict(), f"{tmp_path}/model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": 1}}))
    with pytest.raises(fsdp.CheckpointError, match="(?s)the index cannot be read.*1 is listed as a file"):
        fsdp.load_safetensors(nn.Linear(3, 2), tmp_path)


@pytest.mark.parametrize("wrong", [list, dict, object])
def test_what_is_no_optimizer_is_refused(tmp_path, wrong):
    model = nn.Linear(1, 1)
    fsdp.save_checkpoint(tmp_path, model, step=1)
    for call in (lambda: fsdp.save_checkpoint(tmp_path, model, wrong(), step=2),
                 lambda: fsdp.load_checkpoint(tmp_path, model, wrong())):  # fmt: skip
        with pytest.raises(ConfigError, match="'optimizer' is not an optimizer"):
            call()


def test_names_of_a_folder_are_all_the_models(tmp_path):
    model = nn.Linear(3, 2)
    names = ["extra/x", "optimizer/y", "per_rank/0"]
    tensors = {**model.state_dict(), **{name: torch.ones(1) for name in names}}
    write_safetensors(tensors, f"{tmp_path}/model.safetensors")
    with pytest.raises(fsdp.CheckpointError) as caught:
        fsdp.load_safetensors(model, tmp_path)
    assert all(f"unexpected: '{name}'" in str(caught.value) for name in names)
    assert sorted(fsdp.load_safetensors(model, tmp_path, strict=False).unexpected) == sorted(names)


def test_rename_must_make_names(tmp_path):
    model = nn.Linear(3, 2)
    write_safetensors(model.state_dict(), f"{tmp_path}/model.safetensors")
    for rename in ({"bias": 5}, lambda name: 5 if name == "bias" else name):
        with pytest.raises(ConfigError, match="something else than a name of 'bias'"):
            fsdp.load_safetensors(model, tmp_path, rename=rename)


def write_safetensors(tensors: dict[str, torch.Tensor], path: str, metadata: dict[str, str] | None = None) -> None:
    """The format by hand, for fp32."""
    header: dict = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, tensor in tensors.items():
        piece = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        offsets = [len(data), len(data) + len(piece)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += piece
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)


class ReadOnly(dict):
    def __setitem__(self, key, value) -> None:
        raise OSError("no state for you")


def test_a_failure_after_the_first_write_leaves_a_model_that_refuses_its_forward(tmp_path):
    model, optimizer = trained()
    fsdp.save_checkpoint(tmp_path, model, optimizer, step=1)
    wrapped = fsdp.fsdp_wrap(nn.Linear(3, 2))
    resumed = torch.optim.Adam(wrapped.parameters())
    resumed.state = ReadOnly()
    with pytest.raises(fsdp.CheckpointError, match="no state for you"):
        fsdp.load_checkpoint(tmp_path, wrapped, resumed)
    with pytest.raises(fsdp.FSDPError, match="a load ended in the middle"):
        wrapped(torch.ones(1, 3))
    fsdp.load_checkpoint(tmp_path, wrapped)
    wrapped(torch.ones(1, 3))


def test_own_values_of_no_rank_are_refused_by_name(tmp_path):
    model, _ = trained()
    fsdp.save_checkpoint(tmp_path, model, step=1, per_rank=1)
    edit(
        f"{tmp_path}/step-1",
        lambda body: body["tensors"].update({"per_rank/x": body["tensors"].pop("per_rank/0")}),
    )
    with pytest.raises(fsdp.CheckpointError, match="'per_rank/x' is of no rank"):
        fsdp.load_checkpoint(tmp_path, model)
