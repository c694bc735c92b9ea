"""The harness itself: what it measures, and what it does when ranks fail."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import (
    MLP,
    Counts,
    LowPrecisionReference,
    RanksFailed,
    Stack,
    Vec,
    all_gather_objects,
    assert_close,
    assert_parity,
    assert_rested,
    expect_loud,
    for_each,
    gather,
    gather_slices,
    here,
    joined,
    local_batch,
    mse,
    run,
    seeded,
    sgd,
    train_rank,
    train_ref,
)


def _where() -> tuple[int, int, int]:
    total = torch.tensor([here.rank + 1])
    if dist.is_initialized():
        dist.all_reduce(total)
    return here.rank, here.world_size, int(total)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    total = world_size * (world_size + 1) // 2
    assert run(world_size, _where) == [(rank, world_size, total) for rank in range(world_size)]


def test_one_rank_without_a_group() -> None:
    assert run(1, _where, group=False) == [(0, 1, 1)]


def _pid() -> int:
    return os.getpid()


def _raise_on_one() -> None:
    if here.rank == 1:
        raise ValueError("only here")
    dist.barrier()


def _die() -> None:
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.slow
def test_ranks_are_reused_until_one_fails() -> None:
    first = run(2, _pid)
    assert run(2, _pid) == first
    with pytest.raises(RanksFailed, match="only here"):
        run(2, _raise_on_one)
    assert not set(run(2, _pid)) & set(first)


def test_a_death_by_signal_is_named() -> None:
    with pytest.raises(RanksFailed, match="rank 1: killed by signal SIGKILL"):
        run(2, _die)
    assert run(2, _where)[1] == (1, 2, 3)


def _sleep_for(seconds: float) -> str:
    if here.rank == 1:
        time.sleep(seconds)
    return "done"


def test_a_hang_shows_the_stack() -> None:
    with pytest.raises(RanksFailed, match="(?s)rank 1: no answer within 1 s.*_sleep_for"):
        run(2, _sleep_for, 30, timeout_s=1)


def _leave(how: str) -> str:
    if here.rank == 1:
        if how == "exit":
            os._exit(0)
        if how == "signal":
            os.kill(os.getpid(), signal.SIGABRT)
        time.sleep(60)
    return "still here"


def test_absent_ranks_may_sleep_or_exit_but_not_crash() -> None:
    for how in ("sleep", "exit"):
        assert run(2, _leave, how, fresh=True, pg_timeout_s=5, absent={1})[0] == "still here"


def _spoil(spoil: bool) -> tuple:
    state = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    drawn = torch.rand(1).item()
    if spoil:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
    return (*state, drawn)


def test_state_is_reset_between_calls() -> None:
    assert run(2, _spoil, True) == run(2, _spoil, False)


def _count() -> tuple:
    tensor = torch.ones(3)
    with Counts() as counts:
        output = torch.empty(3 * here.world_size)
        # torch 2.13 renamed these two; both names are counted.
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, tensor)
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(tensor, input=output)
        dist.all_reduce(tensor)
        dist.all_reduce(torch.zeros(1, dtype=torch.int64))
        all_gather_objects("harness")
    dist.all_reduce(tensor)
    return counts.gathers, counts.reductions, [call.kind for call in counts.calls], len(counts.control)


def test_counts() -> None:
    assert run(2, _count) == [([6], [6, 3], ["all_gather", "reduce_scatter", "all_reduce"], 1)] * 2


class _Sliced(nn.Module):
    """A model cut by hand, as the library would: flat slices of 4, 3 or 0 elements, with `full_shape`."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        shards = here.world_size // replicas
        for name, full in (("a", torch.arange(15.0).reshape(5, 3)), ("b", torch.tensor(7.0))):
            size = -(-full.numel() // shards)
            start = here.rank % shards * size
            parameter = nn.Parameter(full.reshape(-1)[start : start + size].clone())
            parameter.full_shape = full.shape
            setattr(self, name, parameter)


def _gather(replicas: int) -> None:
    full = gather(_Sliced(replicas))
    assert_close(full["a"], torch.arange(15.0).reshape(5, 3))
    assert_close(full["b"], torch.tensor(7.0))
    assert gather_slices(_Sliced(replicas), lambda *_: None) == {"a": None, "b": None}


def test_gather_rebuilds_slices_and_replicas() -> None:
    for world_size, replicas in ((1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4)):
        run(world_size, _gather, replicas)


def _differing_replicas() -> None:
    model = _Sliced(2)
    with torch.no_grad():
        model.a[0] += here.rank
    gather(model)


def test_gather_sees_replicas_that_differ() -> None:
    with pytest.raises(RanksFailed, match="a: replicas differ"):
        run(2, _differing_replicas)


def _batch(step: int, rank: int) -> tuple:
    return local_batch(step, rank)


def test_ref_is_the_mean_over_ranks() -> None:
    reference = seeded(MLP)
    train_ref(reference, sgd(reference), [0], _batch, 3)
    mean = seeded(MLP)
    for rank in range(3):
        (mse(mean, local_batch(0, rank)) / 3).backward()
    for found, expected in zip(reference.parameters(), mean.parameters(), strict=True):
        assert_close(found.grad, expected.grad)
        assert_close(found.detach(), (expected - 0.1 * expected.grad).detach())


def test_ref_lp_computes_low_and_sums_in_fp32() -> None:
    masters = Vec(1, 1.0, torch.float32)
    oracle = LowPrecisionReference(masters, torch.bfloat16)
    batches = [(torch.tensor([c]),) for c in (256.0, 1.0, 1.0, 1.0)]
    oracle.backward(batches, lambda model, batch: model(batch[0]))
    assert masters.w.grad.dtype == torch.float32
    assert masters.w.grad.item() == 64.75


def test_models_have_the_sizes_of_the_cases() -> None:
    count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    assert count(MLP()) == 58
    assert [count(block) for block in Stack(2).blocks] == [30, 30]
    assert count(Stack(2).head) == 18
    assert Stack(2)(torch.zeros(4, 5, dtype=torch.float64)).shape == (4, 3)
    vec = Vec(4, 2.0)
    vec(3.0).backward()
    assert vec.w.grad.tolist() == [3.0] * 4


def test_local_batches_depend_on_step_and_rank_only() -> None:
    first = local_batch(1, 2)
    assert torch.equal(first[0], local_batch(1, 2)[0])
    assert not torch.equal(first[0], local_batch(1, 1)[0])
    assert torch.equal(joined(_batch, 1, 3)[0][8:], first[0])


def test_parity_compares_values_names_and_none() -> None:
    reference, model = seeded(MLP), seeded(MLP)
    assert_parity(model, reference)
    batches = lambda step, rank: local_batch(step, rank)  # noqa: E731
    train_rank(model, sgd(model), [0], batches, 0)
    with pytest.raises(AssertionError, match="parameter 0.weight"):
        assert_parity(model, reference)
    train_ref(reference, sgd(reference), [0], batches, 1)
    assert_parity(model, reference, bitwise=True)
    model[0].bias.grad = None
    with pytest.raises(AssertionError, match="gradient of 0.bias"):
        assert_parity(model, reference)


def test_expect_loud_wants_a_named_error_of_the_library() -> None:
    from fsdplite.errors import FSDPError

    def loud() -> None:
        raise FSDPError("no", parameter="proj.weight")

    assert "no" in expect_loud(loud, "proj.weight")
    with pytest.raises(AssertionError, match="does not say"):
        expect_loud(loud, "head.weight")
    with pytest.raises(AssertionError, match="nothing was raised"):
        expect_loud(lambda: 3)
    with pytest.raises(AssertionError, match="not an FSDPError"):
        expect_loud(lambda: [][1])


def test_for_each_names_the_combination() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        for_each([(1,), (0,)], lambda divisor: 1 // divisor)
    assert "(0,)" in caught.value.__notes__[0]


def _hoard() -> None:
    """A rested model, then the same with a full-sized tensor hidden in an object of its own."""
    import fsdplite as fsdp

    model = fsdp.fsdp_wrap(seeded(MLP))
    assert_rested(model)
    mse(model, local_batch(0, here.rank)).backward()
    assert_rested(model)
    model.hidden = {"kept": [torch.ones(58)]}
    with pytest.raises(AssertionError, match="232 bytes"):
        assert_rested(model)


def test_rested_finds_memory_that_the_report_does_not_know() -> None:
    run(1, _hoard)
    run(2, _hoard)
