"""Ranks that differ, fail, leave or stand still. Cases K15, K36, K69, K70, K87."""

from __future__ import annotations

import datetime
import errno
import os
import time
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdplite as fsdp
from fsdplite.checkpoint import storage
from fsdplite.checkpoint.agree import Agreement
from fsdplite.checkpoint.world import World, alone
from tests.harness import MLP, expect_loud, here, run, run_together

from .faults import Fault, FaultyFileSystem
from .parts import filled, values_in

pytestmark = pytest.mark.slow  # most of these wait for a time-out


def saving(root, *needles, **options):
    model, optimizer = filled(1.0)
    started = time.monotonic()
    text = expect_loud(lambda: fsdp.save_checkpoint(root, model, optimizer, step=1, **options).wait(), *needles)
    assert time.monotonic() - started < 5
    assert not os.path.exists(root) or not os.listdir(root)
    return text


def K15_extra(root, background):
    return saving(
        root,
        "'t'",
        "rank 0",
        "rank 1",
        "per_rank",
        extra={"same": 1, "t": torch.tensor(here.rank)},
        background=background,
    )


def K15_one_tensor(root):
    """`extra` that is nothing but a tensor."""
    return saving(root, "extra", "rank 0", "rank 1", "per_rank", extra=torch.tensor(here.rank))


def test_K15_extra_that_is_one_tensor(tmp_path):
    texts = run(2, K15_one_tensor, str(tmp_path / "a"))
    assert texts[0] == texts[1]


def K15_per_rank(root):
    model, optimizer = filled(1.0)
    fsdp.save_checkpoint(
        root, model, optimizer, step=1, per_rank={"t": torch.tensor(here.rank)}, extra={"t": torch.tensor(4)}
    )
    report = fsdp.load_checkpoint(root, model, optimizer)
    return report.per_rank["t"].item(), report.extra["t"].item()


@pytest.mark.parametrize("background", [False, True])
def test_K15_extra_that_differs(tmp_path, background):
    texts = run(2, K15_extra, str(tmp_path / "a"), background)
    assert texts[0] == texts[1]


def test_K15_per_rank(tmp_path):
    assert run(2, K15_per_rank, str(tmp_path)) == [(0, 4), (1, 4)]


def K36_extra(root):
    extra = {"a": 1, "late": 2} if here.rank == 1 else {"a": 1}
    return saving(root, "'late'", "rank 1", extra=extra)


def K36_state(root):
    model, optimizer = filled(1.0)
    if here.rank == 1:
        optimizer.state.clear()
    return expect_loud(
        lambda: fsdp.save_checkpoint(root, model, optimizer, step=1), "'w'", "rank 0", "rank 1", "exp_avg"
    )


def K36_arguments(root):
    model, optimizer = filled(1.0)
    return expect_loud(lambda: fsdp.save_checkpoint(root, model, optimizer, step=here.rank), "'step'", "rank 1")


def K36_one_rank_refuses(root, background=False):
    model, optimizer = filled(1.0)
    return expect_loud(
        lambda: fsdp.save_checkpoint(root, model, optimizer, step=1, keep=1 - here.rank, background=background).wait(),
        "keep", "rank 1",
    )  # fmt: skip


def K36_one_rank_refuses_in_the_background(root):
    return K36_one_rank_refuses(root, True)


def K36_other_calls(root):
    model, optimizer = filled(1.0)
    if here.rank == 0:
        return expect_loud(lambda: fsdp.save_checkpoint(root, model, step=1), "load_checkpoint", "save_checkpoint")
    return expect_loud(lambda: fsdp.load_checkpoint(root, model), "load_checkpoint", "save_checkpoint")


@pytest.mark.parametrize("body", [K36_extra, K36_state, K36_arguments, K36_one_rank_refuses,
                                  K36_one_rank_refuses_in_the_background, K36_other_calls])  # fmt: skip
def test_K36_ranks_disagree(tmp_path, body):
    texts = run(2, body, str(tmp_path / "r"))
    assert texts[0] == texts[1]
    assert not (tmp_path / "r").exists()


def loads_differ(root):
    model, optimizer = filled(1.0)
    for step in (1, 2):
        fsdp.save_checkpoint(root, model, optimizer, step=step)
    texts = [
        expect_loud(lambda: fsdp.load_checkpoint(root, model, step=1 + here.rank), "'step'", "rank 0", "rank 1"),
        expect_loud(lambda: fsdp.load_checkpoint(root, model, optimizer if here.rank else None), "'optimizer'"),
    ]
    assert fsdp.load_checkpoint(root, model, optimizer).step == 2
    return texts


def test_loads_that_differ(tmp_path):
    texts = run(2, loads_differ, str(tmp_path))
    assert texts[0] == texts[1]


def empty_ranks_may_lack_state(root):
    """Rank 1 owns nothing of a parameter of one element; that it has no state for it is no difference."""
    model, optimizer = filled(1.0, n=1)
    if model.w.numel() == 0:
        optimizer.state.clear()
    fsdp.save_checkpoint(root, model, optimizer, step=1)


def test_state_is_not_expected_where_there_are_no_elements(tmp_path):
    run(2, empty_ranks_may_lack_state, str(tmp_path))
    assert values_in(tmp_path / "step-1") == {1.0}
    run(4, empty_ranks_may_lack_state, str(tmp_path))


def K69_body(root, background, world):
    model, optimizer = filled(1.0)
    failing = FaultyFileSystem(
        Fault("fail", 1, errno.EIO), only=lambda name, path: name == "write_at" and "rank-" in path
    )
    fs = failing if here.rank == world - 1 else storage.FileSystem()
    with storage.using(fs):
        handle = None if not background else fsdp.save_checkpoint(root, model, optimizer, step=1, background=True)
        text = expect_loud(
            handle.wait if background else lambda: fsdp.save_checkpoint(root, model, optimizer, step=1),
            f"rank {world - 1}", "'write'", "errno 5", f"rank-{world - 1}-of-{world}.safetensors",
        )  # fmt: skip
    assert fsdp.latest_step(root) is None
    if background:
        expect_loud(handle.wait, f"rank {world - 1}")  # as often as it is asked, and not at the next save any more
    fsdp.save_checkpoint(root, model, optimizer, step=2)
    return text, sorted(os.listdir(root))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("background", [False, True])
def test_K69_a_failing_worker_fails_the_save(tmp_path, world_size, background):
    answers = run(world_size, K69_body, str(tmp_path), background, world_size)
    assert len(set(text for text, _ in answers)) == 1 and answers[0][1] == ["step-2"]


def next_save_raises(root):
    """An error that nobody waited for is raised by the next save, on all ranks, and by that one only."""
    model, optimizer = filled(1.0)
    fault = Fault("fail", 1, errno.ENOSPC) if here.rank == 1 else Fault("count")
    with storage.using(FaultyFileSystem(fault, only=lambda name, path: name == "create")):
        fsdp.save_checkpoint(root, model, optimizer, step=1, background=True)
    text = expect_loud(lambda: fsdp.save_checkpoint(root, model, optimizer, step=2), "rank 1", "errno 28")
    assert fsdp.latest_step(root) is None
    fsdp.save_checkpoint(root, model, optimizer, step=3)
    assert fsdp.latest_step(root) == 3
    return text


def test_errors_surface_at_the_next_save(tmp_path):
    texts = run(2, next_save_raises, str(tmp_path))
    assert texts[0] == texts[1]


def K70_body(root, kind, background):
    model, optimizer = filled(1.0)
    fsdp.save_checkpoint(root, model, optimizer, step=1)
    model, optimizer = filled(2.0)
    fault = Fault("count")
    if here.rank == 1:
        fault = {
            "raise": Fault("fail", 1, errno.EACCES),
            "exit": Fault("crash_after", 2),
        }[kind]
    started = time.monotonic()
    with storage.using(FaultyFileSystem(fault, only=lambda name, path: "rank-1" in path)):
        needles = {
            "raise": ("rank 1", "'write'", "errno 13", "rank-1-of-2"),
            "exit": ("rank 1", "phase"),
        }
        text = expect_loud(
            lambda: fsdp.save_checkpoint(root, model, optimizer, step=2, background=background).wait(), *needles[kind]
        )
    assert time.monotonic() - started < 10
    assert fsdp.latest_step(root) == 1
    return text


@pytest.mark.parametrize("kind", ["raise", "exit"])
def test_K70_one_rank_fails_and_every_rank_hears(tmp_path, kind):
    absent = set() if kind == "raise" else {1}
    texts = run(2, K70_body, str(tmp_path), kind, False, fresh=True, pg_timeout_s=5, absent=absent)
    if kind == "raise":
        assert texts[0] == texts[1]
        assert os.listdir(tmp_path) == ["step-1"]  # where rank 0 can, it cleans up at once
    assert values_in(tmp_path / "step-1") == {1.0}


def test_K70_in_the_background(tmp_path):
    run(2, K70_body, str(tmp_path), "exit", True, fresh=True, pg_timeout_s=5, absent={1})


def stands_still(root, kind):
    """Rank 2 stops: in a save, before it calls it, or in a load. Ranks 0 and 1 wait for it, and for each other."""
    model, optimizer = filled(1.0)
    fsdp.save_checkpoint(root, model, optimizer, step=1)
    if kind == "late" and here.rank == 2:
        time.sleep(60)
    fault = Fault("slow", 1, 60.0) if here.rank == 2 else Fault("count")
    started = time.monotonic()
    with storage.using(FaultyFileSystem(fault, only=lambda name, path: "rank-2" in path)):
        if kind == "load":
            text = expect_loud(lambda: fsdp.load_checkpoint(root, model, optimizer), "rank 2", "phase")
        else:
            text = expect_loud(lambda: fsdp.save_checkpoint(root, model, optimizer, step=2), "rank 2", "phase")
    assert time.monotonic() - started < 10
    assert fsdp.latest_step(root) == 1
    return text


def test_K70_the_rank_that_stands_still_is_named_and_not_who_waits_for_it(tmp_path):
    kinds = ["save", "late", "load"]
    calls = [((str(tmp_path / kind), kind), {2}) for kind in kinds]
    for kind, texts in zip(kinds, run_together(3, stands_still, calls, pg_timeout_s=5)):
        assert texts[0] == texts[1], kind
        assert values_in(tmp_path / kind / "step-1") == {1.0}


def K70_load_body(root, kind):
    model, optimizer = filled(1.0)
    fsdp.save_checkpoint(root, model, optimizer, step=1)
    fault = Fault("count")
    if here.rank == 1:
        fault = {
            "raise": Fault("fail", 1, errno.EACCES),
            "exit": Fault("crash_before", 1),
        }[kind]
    started = time.monotonic()
    with storage.using(FaultyFileSystem(fault, only=lambda name, path: "rank-1" in path)):
        text = expect_loud(lambda: fsdp.load_checkpoint(root, model, optimizer), "rank 1", "phase")
    assert time.monotonic() - started < 10
    return text


@pytest.mark.parametrize("kind", ["raise", "exit"])
def test_K70_in_a_load(tmp_path, kind):
    absent = set() if kind == "raise" else {1}
    texts = run(2, K70_load_body, str(tmp_path), kind, fresh=True, pg_timeout_s=5, absent=absent)
    if kind == "raise":
        assert texts[0] == texts[1] and "errno 13" in texts[0]


def a_close_that_fails(root):
    """The last thing that a load does with a file."""
    model, optimizer = filled(1.0)
    fsdp.save_checkpoint(root, model, optimizer, step=1)
    fault = Fault("fail", 1 if here.rank == 1 else 0, errno.EIO)
    with storage.using(FaultyFileSystem(fault, only=lambda name, path: name == "close" and "rank-" in path)):
        text = expect_loud(lambda: fsdp.load_checkpoint(root, model, optimizer), "rank 1", "errno 5")
    fsdp.load_checkpoint(root, model, optimizer)
    return text


def test_a_file_that_one_rank_cannot_close_after_reading(tmp_path):
    texts = run(2, a_close_that_fails, str(tmp_path))
    assert texts[0] == texts[1]


def slow_but_writing(root):
    """Longer than the timeout in all, but never without progress for so long."""
    model, optimizer = filled(1.0, n=3_000_000)
    fs = FaultyFileSystem()
    if here.rank == 1:
        original = fs.write_at

        def write_at(file, offset, data):
            time.sleep(0.6)
            return original(file, offset, data)

        fs.write_at = write_at
    with storage.using(fs):
        started = time.monotonic()
        fsdp.save_checkpoint(root, model, optimizer, step=1)
    return time.monotonic() - started


def test_a_slow_rank_that_writes_is_not_stuck(tmp_path):
    took = run(2, slow_but_writing, str(tmp_path), fresh=True, pg_timeout_s=3, timeout_s=90)
    assert max(took) > 3


def K87_save(root):
    torch.manual_seed(100 + here.rank)
    torch.rand(3)
    model, optimizer = filled(1.0)
    fsdp.save_checkpoint(root, model, optimizer, step=1, per_rank={"rng": torch.get_rng_state(), "pos": 10 * here.rank})
    return torch.rand(3).tolist()


def K87_load(root):
    model, optimizer = filled(2.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = fsdp.load_checkpoint(root, model, optimizer).per_rank
    told = [str(w.message) for w in caught if "per_rank" in str(w.message)]
    assert all(w.filename == __file__ for w in caught if "per_rank" in str(w.message))
    if own is None:
        return None, None, told
    torch.set_rng_state(own["rng"])
    return torch.rand(3).tolist(), own["pos"], told


def test_K87_per_rank_values_return_to_their_rank(tmp_path):
    expected = run(2, K87_save, str(tmp_path))
    assert expected[0] != expected[1]
    found = run(2, K87_load, str(tmp_path))
    assert [f[:2] for f in found] == [(expected[0], 0), (expected[1], 10)] and not found[0][2] + found[1][2]
    found = run(3, K87_load, str(tmp_path))
    assert [f[:2] for f in found] == [(expected[0], 0), (expected[1], 10), (None, None)]
    assert [len(f[2]) for f in found] == [0, 0, 1] and "rank 2" in found[2][2][0]
    found = run(1, K87_load, str(tmp_path))
    assert found[0][:2] == (expected[0], 0) and len(found[0][2]) == 1 and "rank 1" in found[0][2][0]


def apart(root):
    """Each rank has a model of its own, wrapped over itself alone."""
    groups = [dist.new_group([rank]) for rank in range(here.world_size)]
    model = fsdp.fsdp_wrap(nn.Linear(3, 3), mesh=groups[here.rank])
    fsdp.save_checkpoint(f"{root}/{here.rank}", model, step=1, per_rank=here.rank)
    return fsdp.load_checkpoint(f"{root}/{here.rank}", model).per_rank


def test_per_rank_values_of_a_model_that_one_rank_has_to_itself(tmp_path):
    assert run(2, apart, str(tmp_path)) == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_store_is_gone(rank):
    """Said without a rank that it may not be, and without the transport's frames."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, timeout=datetime.timedelta(seconds=5))
    agreement = Agreement(alone(), "save_checkpoint")
    agreement.world, agreement._store = World(rank, (0, 1)), client
    del server
    with pytest.raises(fsdp.CheckpointError) as caught, agreement.open():
        agreement.collect("arrived", {})
    text = "".join(traceback.format_exception(caught.value))
    assert f"rank {rank} cannot reach the store" in text and "torchrun's agent" in text and "cure:" in text
    assert f"where: rank {rank}" in text and "C++" not in text and "direct cause" not in text and "During" not in text
    assert len(str(caught.value).splitlines()) < 7


def no_own_collectives(root):
    """A save and a load move nothing through collectives."""
    from tests.harness import Counts

    model = fsdp.fsdp_wrap(MLP())
    optimizer = torch.optim.Adam(model.parameters())
    with Counts() as counts:
        fsdp.save_checkpoint(root, model, optimizer, step=1)
        fsdp.save_checkpoint(root, model, optimizer, step=2, background=True).wait()
        fsdp.load_checkpoint(root, model, optimizer)
    assert not counts.calls and not counts.control


def test_no_collectives(tmp_path):
    run(2, no_own_collectives, str(tmp_path))
