"""`fsdplite plan` and `fsdplite doctor`."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest

import fsdplite as fsdp
from fsdplite.cli import doctor, main
from tests.planning.models import GPT, Block

TARGET = "tests.planning.test_command:build"


def build() -> tuple:
    import torch

    return GPT(3, 32, 64, 16, tied=True), lambda step, rank, world_size: torch.zeros(2, 16, dtype=torch.long)


def module_only() -> GPT:
    return GPT(3, 32, 64, 16, tied=True)


def test_plan_prints_what_the_call_returns(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", TARGET, "--world-size", "4", "--policy", "by_class:Block", "--precision", "bf16"]) == 0
    printed = capsys.readouterr().out
    assert printed == str(fsdp.plan(build, world_size=4, policy=fsdp.by_class(Block), precision="bf16"))


def test_plan_as_json_against_a_budget(capsys: pytest.CaptureFixture) -> None:
    options = ["plan", TARGET, "--mesh", "2x4", "--json", "--budget"]
    assert main([*options, "1GiB"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is True and document["mesh"] == [2, 4] and document["has_activations"]
    assert main([*options, str(document["peak_bytes"] - 1)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False and document["remedies"][0]["peak_bytes"] < document["peak_bytes"]


def test_plan_takes_shapes_and_recomputation(capsys: pytest.CaptureFixture) -> None:
    target = "tests.planning.test_command:module_only"
    peaks = []
    for options in ([], ["--input", "2x16:int64"], ["--input", "2x16:int64", "--recompute", "sqrt"]):
        assert main(["plan", target, "--world-size", "2", "--json", *options]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert peaks[0] < peaks[2] < peaks[1]
    assert main(["plan", target, "--world-size", "2", "--json", "--offload", "both"]) == 0
    resting = json.loads(capsys.readouterr().out)["resting_bytes"]
    assert resting["total"] == 0 < resting["host"]


@pytest.mark.parametrize(
    "options, needle",
    [
        ([TARGET], "--world-size"),
        ([TARGET, "--mesh", "2by4"], "2by4"),
        ([TARGET, "--world-size", "2", "--policy", "by_klass:A"], "by_class"),
        ([TARGET, "--world-size", "2", "--policy", "by_class:Blok"], "Block"),
        ([TARGET, "--world-size", "2", "--budget", "lots"], "budget"),
        ([TARGET, "--world-size", "2", "--optimizer", "Muon"], "whole tensors"),
        ([TARGET, "--world-size", "2", "--input", "2x16:integer"], "--input"),
        (["tests.planning.test_command:absent", "--world-size", "2"], "absent"),
    ],
)
def test_plan_used_wrongly(options: list[str], needle: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", *options]) == 2
    assert needle in capsys.readouterr().err


def statuses(findings: object) -> dict[str, str]:
    return {finding.what: finding.status for finding in findings}


def test_doctor_finds_this_machine_fit(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert main(["doctor", "--json", "--path", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {finding["what"]: finding["status"] for finding in document["findings"]}
    assert document["fine"] and found["two ranks"] == found["disk"] == found["torch"] == "ok"
    assert not list(tmp_path.iterdir())


def test_doctor_exits_with_one_where_something_would_fail(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert main(["doctor", "--quick", "--path", str(tmp_path / "absent")]) == 1
    assert "problem disk" in capsys.readouterr().out
    assert main(["doctor", "--ranks", "0"]) == 2


@pytest.mark.parametrize("size", ["0", "-2", "two", ""])
def test_doctor_bears_a_broken_launcher(size: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
    found = {finding.what: finding.found for finding in doctor.examine(tmp_path, trial=False)}
    assert found["threads"].partition(", ")[2].startswith("1 rank of")


def test_doctor_on_the_launcher_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert statuses(doctor.launcher({"RANK": "0"}))["launcher"] == "problem"
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert statuses(doctor.launcher(torchrun))["launcher"] == "ok"
    for wrong in ({"RANK": "2"}, {"MASTER_PORT": "http"}, {"MASTER_PORT": "99999"}, {"LOCAL_WORLD_SIZE": "0"},
                  {"LOCAL_WORLD_SIZE": "x"}, {"LOCAL_WORLD_SIZE": "3"}):  # fmt: skip
        assert statuses(doctor.launcher(torchrun | wrong))["launcher"] == "problem", wrong
    assert statuses(doctor.addresses({"GLOO_SOCKET_IFNAME": "absent0"}))["GLOO_SOCKET_IFNAME"] == "problem"

    def refuse(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    found = statuses(doctor.addresses({"MASTER_ADDR": "nowhere"}))
    assert found["host name"] == found["MASTER_ADDR"] == "problem"
    assert statuses(doctor.addresses({"GLOO_SOCKET_IFNAME": "lo"}))["host name"] == "note"


def test_doctor_on_scarce_resources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import resource

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 * 2**20, 0, 64 * 2**20))
    assert statuses(doctor.disk(tmp_path))["disk"] == "problem"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    found = statuses(doctor.limits(8))
    assert found["open files"] == found["address space"] == found["file size"] == "problem"
    monkeypatch.setattr(doctor, "_available_bytes", lambda: 2 * 2**30)
    assert statuses(doctor.memory(1))["host memory"] == "ok"
    assert statuses(doctor.memory(4))["host memory"] == "problem"
    assert statuses(doctor.threads({"OMP_NUM_THREADS": "64"}, 8))["threads"] == "note"
    assert statuses(doctor.threads({"OMP_NUM_THREADS": "1"}, 1))["threads"] == "ok"
    assert statuses(doctor.threads({"OMP_NUM_THREADS": "all"}, 1))["OMP_NUM_THREADS"] == "note"
