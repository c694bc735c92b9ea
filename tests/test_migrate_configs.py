"""`fsdplite migrate`: configuration files of DeepSpeed, Accelerate and the Trainer."""

from __future__ import annotations

import ast
import sys

import pytest

from fsdplite.migration import config_files, yaml_tree


def test_deepspeed_configuration() -> None:
    text = """{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": 8,
  "gradient_clipping": 0.5,
  "bf16": {"enabled": false},
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": "auto"}},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "nvme", "nvme_path": "\\/fast"},
    "offload_param": {"device": "nvme"},
    "overlap_comm": true, "zero_quantized_weights": true
  },
  "flops_profiler": {"enabled": false, "profile_step": 1},
  "my_setting": null, "other_setting": 1
}"""
    findings = config_files.findings(text.encode(), is_json=True)
    assert [(f.line, f.verdict, f.write) for f in findings] == [
        (1, "change", 'fsdp.fsdp_wrap(model, policy, stage=2, precision="fp16", '
                      'offload=fsdp.Offload(optimizer="nvme", path="/fast"))'),
        (2, "drop", ""),
        (3, "change", "(loss / 8).backward()"),
        (4, "change", "model.clip_grad_norm_(0.5)"),
        (6, "change", 'precision="fp16"'),
        (6, "change", "scaler = fsdp.LossScaler(init_scale=2.0**12)"),
        (7, "change", "optimizer = fsdp.offloaded(torch.optim.AdamW, model, lr=0.0003, betas=(0.9, 0.95), "
                       "weight_decay=...)"),
        (9, "change", "stage=2"),
        (10, "change", 'offload=fsdp.Offload(optimizer="nvme", path="/fast")'),
        (11, "none", ""),
        (12, "drop", ""),
        (12, "none", ""),
        (15, "none", ""),
        (15, "none", ""),
    ]  # fmt: skip


def configuration(text: str, is_json: bool = True) -> list[tuple[int, str, str]]:
    return [(f.line, f.verdict, f.write) for f in config_files.findings(text.encode(), is_json)]


@pytest.mark.parametrize(
    "zero, written",
    [('3', "stage=3"), ('{"stage": "3"}', "stage=3"), ("true", "stage=1"), ("null", "stage=0"),
     ('{"stage": 7}', "stage=...")],
)  # fmt: skip
def test_a_stage_in_any_form(zero: str, written: str) -> None:
    (_, _, wrap), *others = configuration(f'{{"train_batch_size": 8, "zero_optimization": {zero}}}')
    assert wrap == f"fsdp.fsdp_wrap(model, policy, {written})"
    assert [verdict for _, verdict, _ in others if verdict == "none"] == (["none"] if "7" in zero else [])


def test_precision_that_is_filled_in_is_left_open() -> None:
    wrap = configuration('{"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}')[0][2]
    assert wrap == "fsdp.fsdp_wrap(model, policy, stage=0, precision=...)"
    assert "bf16" in configuration('{"bfloat16": {"enabled": true}}')[0][2]


@pytest.mark.parametrize(
    "optimizer, written",
    [
        ('"AdamW", "params": {"lr": 1}', "torch.optim.AdamW(model.parameters(), lr=1, weight_decay=0.0)"),
        ('"adam", "params": {"adam_w_mode": false, "weight_decay": 1}',
         "torch.optim.Adam(model.parameters(), weight_decay=1)"),
        ('"adamw", "params": {"torch_adam": true}', "torch.optim.AdamW(model.parameters())"),
        ('"AdamW", "params": {"lr": "auto"}', "torch.optim.AdamW(model.parameters(), lr=..., weight_decay=0.0)"),
        ('"RMSprop", "params": {"lr": 0.1}', "torch.optim.RMSprop(model.parameters(), lr=0.1)"),
    ],
)  # fmt: skip
def test_optimizers_of_deepspeed_keep_their_defaults(optimizer: str, written: str) -> None:
    text = f'{{"optimizer": {{"type": {optimizer}}}}}'
    assert [write for _, _, write in configuration(text) if "optim" in write] == ["optimizer = " + written]


def test_comments_last_commas_and_surroundings_of_a_configuration() -> None:
    text = """// of a run
    {"run": {"name": "a // b, ]", "deepspeed": { # the engine's
        "train_batch_size": 8, /* and
        */ "zero_optimization": {"stage": 2,},
    },}}
    """
    assert configuration(text) == [
        (2, "change", "fsdp.fsdp_wrap(model, policy, stage=2)"), (3, "drop", ""), (4, "change", "stage=2")
    ]  # fmt: skip


def test_configurations_of_accelerate() -> None:
    text = """
# accelerate config
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_transformer_layer_cls_to_wrap: Block,Head   # two
  fsdp_offload_params: true
  "fsdp_new": 3
mixed_precision: bf16
num_processes: 8
"""
    assert configuration(text, is_json=False) == [
        (4, "drop", ""),
        (6, "change", "fsdp.fsdp_wrap(model, fsdp.by_class('Block', 'Head'), stage=2, precision=\"bf16\", "
                      "offload=fsdp.Offload(params=\"cpu\"))"),
        (10, "none", ""),
    ]  # fmt: skip
    text = "distributed_type: MULTI_GPU\nmixed_precision: fp16\n"
    assert configuration(text, is_json=False) == [(1, "change", 'fsdp.fsdp_wrap(model, stage=0, precision="fp16")')]
    text = "deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}"
    assert configuration(text, is_json=False) == [
        (1, "change", 'fsdp.fsdp_wrap(model, policy, stage=3, offload=fsdp.Offload(optimizer="cpu"))')
    ]
    text = '{"transformer_layer_cls_to_wrap": ["Block"], "fsdp_reshard_after_forward": false}'
    assert configuration(text) == [
        (1, "change", "fsdp.fsdp_wrap(model, fsdp.by_class('Block'), reshard_after_forward=False)")
    ]


def test_yaml_as_a_tree() -> None:
    text = """---
a: [1, 'x, y',
  null]
b: &known
- one
- key: 2.5
c: *known
d: |
  two
  lines
e: 2026-11-30
"""
    tree = yaml_tree.parse(text)
    assert ast.literal_eval(tree) == {
        "a": [1, "x, y", None], "b": ["one", {"key": 2.5}], "c": ["one", {"key": 2.5}], "d": "two\nlines\n",
        "e": "2026-11-30",
    }  # fmt: skip
    assert isinstance(tree, ast.Dict) and [key.lineno for key in tree.keys] == [2, 4, 7, 8, 11]
    for wrong, line in (("a: [1,\n", 2), ("b: 1\n\tc: 1", 2), ("a: 'x", 1), ("a: 1\n    b: 2", 2), ("a: 1\n---\nb: 2", 2)):
        with pytest.raises(ValueError) as failure:
            yaml_tree.parse(wrong)
        assert failure.value.lineno >= line
    laughs = "\n".join(["a0: &a0 ha", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))])
    for wrong in ("a: &a [*a]", laughs):
        with pytest.raises(ValueError, match="aliases|itself"):
            yaml_tree.parse(wrong)


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ValueError, match=r"pip install 'fsdplite\[migrate\]'"):
        yaml_tree.parse("a: 1")
