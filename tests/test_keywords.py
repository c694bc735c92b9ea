"""A misspelled keyword of any public call is an error that suggests the right one."""

from __future__ import annotations

import inspect

import pytest

import fsdplite as fsdp
from fsdplite.errors import ConfigError, UnknownOptionError
from fsdplite.inspect import trace

# What offloaded() does not know is for the optimizer that it makes; plan() has its own test; policies by class and by
# name have no keywords; the others are not for users to make.
EXCEPT = {"offloaded", "plan", "by_class", "by_name", "from_model", "FSDPUnit", "CheckpointError", "FSDPError",
          "__version__"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(fsdp.__all__) - EXCEPT))
def test_a_misspelled_keyword_suggests_the_right_one(name: str) -> None:
    called = getattr(fsdp, name)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    right = [parameter.name for parameter in inspect.signature(called).parameters.values() if parameter.kind in kinds]
    for word in right:
        wrong = word[0] + word[2:]
        with pytest.raises(UnknownOptionError) as caught:
            called(**{wrong: 1})
        assert isinstance(caught.value, ConfigError) and isinstance(caught.value, TypeError)
        assert f"found: {wrong!r} (did you mean {word!r}?)" in str(caught.value)
    assert right


def test_calls_are_what_they_were_otherwise() -> None:
    topology = fsdp.Topology(4, flops=1e12)
    assert (topology.ranks_per_node, topology.flops, topology.jitter) == (4, 1e12, 0.0)
    assert topology == fsdp.Topology(flops=1e12, ranks_per_node=4) and isinstance(topology, fsdp.Topology)
    assert list(inspect.signature(fsdp.Link).parameters) == ["bandwidth", "latency"]
    assert fsdp.trace is trace and trace.__module__ == "fsdplite.inspect" and trace.__doc__.startswith("Record every")
    with pytest.raises(TypeError, match="missing 1 required"):
        fsdp.Link(1.0)
