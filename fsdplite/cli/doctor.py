"""``fsdplite doctor``: what would go wrong on this machine, before a run finds out."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Finding", "add_parser", "examine"]

OK, NOTE, PROBLEM = "ok", "note", "problem"

_OLDEST = {"torch": (2, 11), "safetensors": (0, 4), "rich": (13,)}
_GIB = 2**30
_TRIAL_S = 60


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: The thing.
        status: ``"ok"``, ``"note"`` (may matter) or ``"problem"`` (something will fail).
        found: What is there.
        cure: What to do about it; empty where nothing is to be done.
    """

    what: str
    status: str
    found: str
    cure: str = ""


def add_parser(commands: Any) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "doctor",
        help="what would go wrong on this machine",
        description="Look at versions, backends, addresses, disk, limits, shared memory and threads, and let two ranks "
        "exchange one tensor. Run it where the training will run, under the same launcher and limits.",
        epilog="exit codes: 0 fine, 1 a problem was found, 2 usage",
    )
    add = parser.add_argument
    add("--path", type=Path, default=Path("."), help="where checkpoints will be written (default: here)")
    add("--ranks", type=int, default=None, metavar="N",
        help="ranks on this machine (default: one a GPU, else LOCAL_WORLD_SIZE or 1)")
    add("--quick", action="store_true", help="without the trial of two ranks")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.ranks is not None and args.ranks < 1:
        print(f"fsdplite doctor: --ranks: expected at least 1, found {args.ranks}", file=sys.stderr)
        return 2
    findings = list(examine(args.path, args.ranks, trial=not args.quick))
    failed = any(finding.status == PROBLEM for finding in findings)
    if args.json:
        print(json.dumps({"fine": not failed, "findings": [asdict(finding) for finding in findings]}))
    else:
        _print(findings)
    return 1 if failed else 0


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.status:8}{finding.what:{width}}  {finding.found}")
        if finding.cure:
            print(f"{'':8}{'':{width}}  cure: {finding.cure}")
    counts = [sum(finding.status == status for finding in findings) for status in (PROBLEM, NOTE)]
    print(f"{counts[0]} problems, {counts[1]} notes")


def examine(path: Path, ranks: int | None = None, *, trial: bool = True) -> Iterator[Finding]:
    """Everything, in the order in which a run would meet it."""
    yield from versions()
    if importlib.util.find_spec("torch") is None:
        return
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # nothing here needs it
    try:
        import torch
    except Exception as failure:  # a broken install fails in many ways
        yield Finding("torch", PROBLEM, f"cannot be imported: {failure}", "install it again for this machine")
        return
    yield from backends(torch)
    yield from accelerators(torch)
    local = ranks or torch.cuda.device_count() or _count(os.environ.get("LOCAL_WORLD_SIZE", "")) or 1
    yield from launcher(os.environ)
    yield from addresses(os.environ)
    yield from disk(path)
    yield from limits(local)
    yield from shared_memory()
    yield from memory(local)
    yield from threads(os.environ, local)
    if trial:
        yield two_ranks()


# ------------------------------------------------------------------------------------------------------------ software


def versions() -> Iterator[Finding]:
    """Python and the three dependencies."""
    python = platform.python_version()
    fine = sys.version_info >= (3, 11)
    yield Finding("python", OK if fine else PROBLEM, python, "" if fine else "use Python 3.11 or newer")
    for name, oldest in _OLDEST.items():
        wanted = ".".join(map(str, oldest))
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, PROBLEM, "not installed", f"pip install {name}")
            continue
        numbers = tuple(int(part) for part in found.split("+")[0].split(".")[: len(oldest)] if part.isdigit())
        fine = numbers >= oldest
        yield Finding(name, OK if fine else PROBLEM, found, "" if fine else f"install {name} {wanted} or newer")


def backends(torch: Any) -> Iterator[Finding]:
    """What ranks can talk through."""
    dist = torch.distributed
    if not dist.is_available():
        yield Finding("torch.distributed", PROBLEM, "not part of this torch", "install a torch built with it")
        return
    has_nccl = dist.is_nccl_available()
    found = [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", has_nccl)) if there]
    if "gloo" not in found:
        yield Finding("backends", PROBLEM, ", ".join(found) or "none", "install a torch built with gloo: checks use it")
    elif torch.cuda.is_available() and not has_nccl:
        yield Finding("backends", PROBLEM, "gloo, and CUDA without NCCL", "install a torch built with NCCL")
    else:
        yield Finding("backends", OK, ", ".join(found))


def accelerators(torch: Any) -> Iterator[Finding]:
    """GPUs that torch sees, and those that it does not."""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        yield Finding("GPUs", OK, ", ".join(f"{p.name} ({p.total_memory / _GIB:.0f} GiB)" for p in names))
    elif torch.version.cuda is not None:
        cure = "check the driver and CUDA_VISIBLE_DEVICES"
        yield Finding("GPUs", NOTE, "none, and this torch is built for CUDA", cure)
    elif shutil.which("nvidia-smi"):
        yield Finding("GPUs", NOTE, "there may be some, but this torch is built for CPUs", "install a torch for CUDA")
    else:
        yield Finding("GPUs", OK, "none: ranks run on the CPU over gloo")


# ----------------------------------------------------------------------------------------------------- launch, network


def launcher(environment: Any) -> Iterator[Finding]:
    """The variables that torchrun sets."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    there = [name for name in names if name in environment]
    if not there or there == ["MASTER_ADDR"]:
        yield Finding("launcher", OK, "none: plain python is one rank")
        return
    missing = [name for name in names if name not in environment]
    if missing:
        yield Finding("launcher", PROBLEM, f"{', '.join(there)} without {', '.join(missing)}",
                      "start with torchrun, or unset them all")  # fmt: skip
        return
    rank, size, port = environment["RANK"], environment["WORLD_SIZE"], environment["MASTER_PORT"]
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        yield Finding("launcher", PROBLEM, f"RANK={rank} and WORLD_SIZE={size}", "ranks are 0 to WORLD_SIZE - 1")
    elif not 0 < _count(port) < 65536:
        yield Finding("launcher", PROBLEM, f"MASTER_PORT={port}", "a port is a number from 1 to 65535")
    elif not 0 < _count(local) <= int(size):
        yield Finding("launcher", PROBLEM, f"LOCAL_WORLD_SIZE={local} and WORLD_SIZE={size}",
                      "ranks on this machine are 1 to WORLD_SIZE")  # fmt: skip
    else:
        yield Finding("launcher", OK, f"rank {rank} of {size}")


def _count(text: str) -> int:
    """A number that an environment variable holds; 0 where it holds none."""
    return int(text) if text.isdigit() else 0


def addresses(environment: Any) -> Iterator[Finding]:
    """Does this host know itself, and the first rank's host?"""
    host = socket.gethostname()
    name = "GLOO_SOCKET_IFNAME"
    try:
        found = sorted({info[4][0] for info in socket.getaddrinfo(host, None)})
    except OSError as failure:
        status = NOTE if name in environment else PROBLEM
        yield Finding("host name", status, f"'{host}' does not resolve: {failure}",
                      f"add it to /etc/hosts, or name the network interface in {name}")  # fmt: skip
    else:
        status, cure = OK, ""
        if all(address.startswith("127.") or address == "::1" for address in found):
            status = NOTE
            cure = f"for several machines name the network interface in {name}: no other reaches a loopback address"
        yield Finding("host name", status, f"'{host}' is {', '.join(found)}", cure)
    interfaces = [interface for _, interface in socket.if_nameindex()]
    for variable in (name, "NCCL_SOCKET_IFNAME"):
        chosen = environment.get(variable, "")
        parts = [part.lstrip("=^") for part in chosen.split(",") if part]
        if parts and not any(interface.startswith(part) for part in parts for interface in interfaces):
            yield Finding(variable, PROBLEM, f"'{chosen}' is not one of {', '.join(interfaces)}", "name one of them")
    master = environment.get("MASTER_ADDR")
    if master:
        try:
            socket.getaddrinfo(master, None)
            yield Finding("MASTER_ADDR", OK, master)
        except OSError as failure:
            found = f"'{master}' does not resolve: {failure}"
            yield Finding("MASTER_ADDR", PROBLEM, found, "use the address of the first rank's machine")
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname(), timeout=5):
                yield Finding("loopback", OK, "a port can be opened and reached")
    except OSError as failure:
        yield Finding("loopback", PROBLEM, f"ranks of this machine cannot connect: {failure}",
                      "allow local connections (sandbox, firewall)")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- resources


def disk(path: Path) -> Iterator[Finding]:
    """Room, and whether files become durable."""
    try:
        free = shutil.disk_usage(path).free
        with tempfile.NamedTemporaryFile(dir=path, prefix=".fsdplite-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as failure:
        yield Finding("disk", PROBLEM, f"{path.resolve()} cannot be written: {failure.strerror or failure}",
                      "choose another folder with --path, or change its permissions")  # fmt: skip
        return
    little = free < _GIB
    cure = "make room: a checkpoint with Adam's state takes 12 bytes a parameter"
    found = f"{free / _GIB:.1f} GiB free at {path.resolve()}"
    yield Finding("disk", PROBLEM if little else OK, found, cure if little else "")


def limits(ranks: int) -> Iterator[Finding]:
    """What ``ulimit`` allows one process."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 256 + 4 * ranks  # gloo holds a socket a pair of ranks; data loaders hold more
    if soft != resource.RLIM_INFINITY and soft < needed:
        found = f"at most {soft}, {needed} may be needed"
        yield Finding("open files", PROBLEM, found, f"ulimit -n {max(4096, needed)}")
    else:
        yield Finding("open files", OK, f"at most {soft if soft != resource.RLIM_INFINITY else 'unlimited'}")
    for which, flag, what in (
        (resource.RLIMIT_AS, "-v", "address space"),
        (resource.RLIMIT_DATA, "-d", "data segment"),
        (resource.RLIMIT_FSIZE, "-f", "file size"),
    ):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            status = PROBLEM if soft < 2 * _GIB else NOTE
            yield Finding(what, status, f"limited to {soft / _GIB:.2f} GiB", f"ulimit {flag} unlimited")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < 64 * 2**20:
        yield Finding("locked memory", NOTE, f"limited to {soft // 1024} KiB", "ulimit -l unlimited, for InfiniBand")


def shared_memory() -> Iterator[Finding]:
    """``/dev/shm``: data loaders' workers hand batches over in it, and NCCL its buffers."""
    place = Path("/dev/shm")
    if sys.platform != "linux":
        return
    if not place.is_dir():
        yield Finding("shared memory", PROBLEM, "there is no /dev/shm", "mount a tmpfs there")
        return
    size = shutil.disk_usage(place)
    small = size.total < 256 * 2**20
    found = f"{size.free / _GIB:.2f} of {size.total / _GIB:.2f} GiB free"
    cure = "start the container with --shm-size=8g: worker processes and NCCL need more"
    yield Finding("shared memory", NOTE if small else OK, found, cure if small else "")


def memory(ranks: int) -> Iterator[Finding]:
    """Host memory, and what a control group leaves of it."""
    available = _available_bytes()
    if available is None:
        return
    each = available / ranks
    little = each < _GIB
    found = f"{available / _GIB:.1f} GiB available" + (f", {each / _GIB:.1f} a rank" if ranks > 1 else "")
    cure = "start fewer ranks: a process that imports torch takes 0.3 GiB before it has a model"
    yield Finding("host memory", PROBLEM if little else OK, found, cure if little else "")


def _available_bytes() -> int | None:
    found = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    old = "memory/memory."  # control groups of the first version
    for names in (("memory.max", "memory.current"), (f"{old}limit_in_bytes", f"{old}usage_in_bytes")):
        values = [next(_lines(Path("/sys/fs/cgroup") / name), "") for name in names]
        if all(value.isdigit() for value in values):
            found.append(max(0, int(values[0]) - int(values[1])))
    return min(found) if found else None


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return


def threads(environment: Any, ranks: int) -> Iterator[Finding]:
    """Threads of all ranks beside the CPUs that this process may use."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = next(_lines(Path("/sys/fs/cgroup/cpu.max")), "").split()
    if len(words) == 2 and words[0].isdigit():
        cpus = max(1, min(cpus, round(int(words[0]) / int(words[1]))))
    text = environment.get("OMP_NUM_THREADS", "")
    each = _count(text) or cpus
    if text and not _count(text):
        yield Finding("OMP_NUM_THREADS", NOTE, f"'{text}' is no number of threads and is not heeded", "OMP_NUM_THREADS=1")
    crowded = each * ranks > cpus and ranks > 1
    found = f"{cpus} CPUs, {ranks} rank{'s' if ranks > 1 else ''} of {each} threads"
    cure = f"OMP_NUM_THREADS={max(1, cpus // ranks)}: more threads than CPUs slow each other down"
    yield Finding("threads", NOTE if crowded else OK, found, cure if crowded else "")


# --------------------------------------------------------------------------------------------------------------- trial

_TRIAL = """
import sys, warnings
warnings.filterwarnings("ignore")
from datetime import timedelta
import torch, torch.distributed as dist
rank = int(sys.argv[1])
wait = timedelta(seconds=30)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2, timeout=wait)
value = torch.full((1024,), float(rank + 1))
dist.all_reduce(value)
assert value.eq(3).all()
dist.destroy_process_group()
"""


def two_ranks() -> Finding:
    """Two processes of this machine reduce one tensor over gloo."""
    with tempfile.TemporaryDirectory(prefix="fsdplite-doctor-") as folder:
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        environment["OMP_NUM_THREADS"] = "1"
        processes = [
            subprocess.Popen([sys.executable, "-c", _TRIAL, str(rank), f"{folder}/rendezvous"], env=environment,
                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]  # fmt: skip
        errors = []
        for process in processes:
            try:
                _, error = process.communicate(timeout=_TRIAL_S)
                if process.returncode:
                    errors.append((error.strip() or f"exit code {process.returncode}").splitlines()[-1])
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                errors.append(f"no answer within {_TRIAL_S} s")
    if errors:
        cure = "see the host name and loopback above; GLOO_SOCKET_IFNAME names the network interface"
        return Finding("two ranks", PROBLEM, errors[0], cure)
    return Finding("two ranks", OK, "exchanged a tensor over gloo")
