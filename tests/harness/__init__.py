"""The multi-rank test harness: warm ranks, oracles, and checks that share no code with the library.

Ranks
    `run(world_size, fn, *args, **kwargs)` calls a module-level `fn` on every rank and returns the results by rank::

        def body(stage):
            model = fsdp.fsdp_wrap(seeded(MLP), stage=stage)
            ...
            assert_rested(model)

        def test_T0_something():
            run(2, body, 3)

    Inside `fn` the process group is up (gloo), `here.rank` and `here.world_size` say where it runs. Ranks are forked
    from a server that has imported torch, and live for the whole session, so a call costs some hundredths of a second.
    Between calls seed, default dtype, deterministic mode, grad mode, threads and warning filters are reset.
    An exception, a death by signal or a late answer fails that test alone, with every rank's traceback (and stacks, if
    it hung); those ranks are thrown away. Results must pickle: return numbers or `plain(tensor)`.

    Faults: `run(2, fn, fresh=True, pg_timeout_s=5, absent={1})` uses new ranks with a short timeout, of which rank 1
    may sleep or exit (not die of a signal); its result is None. `run(1, fn, group=False)` has no process group.
    `run_together` makes several such calls at the same time, for those that mostly wait. `run_program` runs a file as
    torchrun would and returns what it printed.

    `for_each(combinations, body)` loops inside a rank and names the combination that failed.

Models and oracles
    `Vec`, `MLP`, `Block`, `Stack`, built by `seeded(Model, ...)`; `local_batch(step, rank)`; `mse`, `sgd`, `adamw`;
    `train_rank` for the wrapped model, `train_ref` for REF, `LowPrecisionReference` for REF-LP.

Checks (all ranks call them)
    `assert_parity(model, reference)`, `assert_rested(model)`, `expect_loud(fn, *needles)`,
    `with Counts() as counts`, `gather(model)`, `gather_grads(model)`, `gather_state(model, optimizer, key)`.
"""

from tests.harness.checks import assert_all, assert_close, assert_parity, assert_rested, expect_loud, for_each
from tests.harness.counts import Collective, Counts
from tests.harness.gathering import (
    all_gather_objects,
    full_shape,
    gather,
    gather_grads,
    gather_slices,
    gather_state,
    plain,
)
from tests.harness.models import MLP, Block, Stack, Vec, seeded
from tests.harness.pool import RanksFailed, close_pools, run, run_together
from tests.harness.programs import run_program
from tests.harness.reference import (
    LowPrecisionReference,
    adamw,
    joined,
    local_batch,
    mean_backward,
    mse,
    sgd,
    stack_batch,
    train,
    train_rank,
    train_ref,
)
from tests.harness.worker import here

__all__ = [
    "Block",
    "Collective",
    "Counts",
    "LowPrecisionReference",
    "MLP",
    "RanksFailed",
    "Stack",
    "Vec",
    "adamw",
    "all_gather_objects",
    "assert_all",
    "assert_close",
    "assert_parity",
    "assert_rested",
    "close_pools",
    "expect_loud",
    "for_each",
    "full_shape",
    "gather",
    "gather_grads",
    "gather_slices",
    "gather_state",
    "here",
    "joined",
    "local_batch",
    "mean_backward",
    "mse",
    "plain",
    "run",
    "run_program",
    "run_together",
    "seeded",
    "sgd",
    "stack_batch",
    "train",
    "train_rank",
    "train_ref",
]
