"""Owns the look at this machine before an engine is trusted to it: one finding per question, with advice.

Knows no running engine. Called by `engine doctor`. A GPU is looked for in a child process, because a driver call may
hang or crash; its absence is a fact, not a failure.
"""

import importlib.metadata
import os
import platform
import resource
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import zmq
from msgspec import Struct

from ipc.channel import SOCKET_PATH_MAX

FILES_MIN = 4096
GPU_S = 10.0
PACKAGES = ("msgspec", "pyzmq", "uvloop", "torch", "numpy", "structlog", "click", "nvidia-ml-py")
NVML = """
import pynvml
pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    print(name, uuid, f"{pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30:.0f} GiB")
"""


class Finding(Struct, frozen=True):
    """One answer. `advice` says what to do when the verdict is not ok."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def examine(run_dir: str) -> list[Finding]:
    """Every finding, in the order in which they matter. Changes nothing."""
    return [
        _python(),
        *_packages(),
        _libzmq(),
        _kernel(),
        _run_dir(Path(run_dir)),
        _cores(),
        _memory(),
        _files(),
        _gpu(),
    ]


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _packages() -> list[Finding]:
    findings = []
    for name in PACKAGES:
        try:
            findings.append(Finding(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, "fail", "not installed", "run bin/engine, which installs what is missing"))
    return findings


def _libzmq() -> Finding:
    if zmq.zmq_version_info() < (4, 3, 5):
        return Finding("libzmq", "fail", zmq.zmq_version(), "install pyzmq 27 or newer from its wheel")
    return Finding("libzmq", "ok", zmq.zmq_version())


def _kernel() -> Finding:
    """memfd with seals and pidfd are what health pages and death detection stand on."""
    release = platform.release()
    try:
        fd = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.close(fd)
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return Finding("kernel", "fail", f"{release}: {error}", "Linux 5.3 or newer with memfd and pidfd is needed")
    return Finding("kernel", "ok", f"{platform.system()} {release}: memfd, seals, pidfd")


def _run_dir(path: Path) -> Finding:
    size = len(str(path / "client").encode())
    if size > SOCKET_PATH_MAX:
        advice = f"choose a run_dir of at most {SOCKET_PATH_MAX - len('/client')} bytes"
        return Finding("run_dir", "fail", f"{path}: socket paths of {size} bytes", advice)
    if not path.exists():
        parent = next(each for each in path.parents if each.exists())
        if os.access(parent, os.W_OK):
            return Finding("run_dir", "ok", f"{path} (will be made)")
        return Finding("run_dir", "fail", f"{parent} is not writable", "set engine.run_dir or ENGINE_RUN_DIR")
    found = path.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        return Finding("run_dir", "fail", f"{path} is open to others", f"chmod 700 {path}, or choose another")
    return Finding("run_dir", "ok", str(path))


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    quota = _cgroup("cpu.max")
    if quota and quota.split()[0] != "max":
        limit, period = (int(part) for part in quota.split())
        if limit / period < usable:
            found = f"{usable} usable, limited to {limit / period:.1f} by the cgroup"
            return Finding("cores", "warn", found, "plan for the limit, or raise cpu.max")
    return Finding(
        "cores",
        "ok" if usable > 1 else "warn",
        f"{usable} usable",
        "" if usable > 1 else "front and worker share one core",
    )


def _memory() -> Finding:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    available = kib["MemAvailable"] / 2**20
    found = f"{available:.1f} GiB available of {kib['MemTotal'] / 2**20:.1f}"
    limit = _cgroup("memory.max")
    if limit and limit != "max":
        found += f", cgroup limit {int(limit) / 2**30:.1f} GiB"
    if available < 1:
        return Finding("memory", "warn", found, "less than 1 GiB is available")
    return Finding("memory", "ok", found)


def _cgroup(name: str) -> str:
    """A value of this process's cgroup (version 2), "" when there is none."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        return Path(f"/sys/fs/cgroup{group}", name).read_text().strip()
    except (OSError, ValueError):
        return ""


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (up to {hard})"
    if soft < FILES_MIN:
        return Finding("open files", "warn", found, f"ulimit -n {FILES_MIN}, or LimitNOFILE= under systemd")
    return Finding("open files", "ok", found)


def _gpu() -> Finding:
    started = time.monotonic()
    try:
        answer = subprocess.run(
            [sys.executable, "-c", NVML], capture_output=True, text=True, timeout=GPU_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("gpu", "warn", f"the driver did not answer in {GPU_S:g} s", "look at dmesg; reload the driver")
    if answer.returncode:
        why = (answer.stderr.strip().splitlines() or ["unknown"])[-1]
        return Finding("gpu", "ok", f"none usable ({why})")
    devices = "; ".join(answer.stdout.split("\n")).strip("; ")
    return Finding("gpu", "ok", f"{devices or 'none'} ({time.monotonic() - started:.1f} s)")


def render(findings: list[Finding]) -> str:
    """One line per finding; advice below what needs it."""
    width = max(len(each.name) for each in findings)
    lines = []
    for each in findings:
        lines.append(f"{each.verdict:<5} {each.name:<{width}}  {each.found}")
        if each.advice:
            lines.append(f"{'':<6}{'':<{width}}  -> {each.advice}")
    return "\n".join(lines)
