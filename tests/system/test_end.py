"""How an engine ends, how it refuses to start, and what it leaves in its run directory."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ipc.messages import Failed, Finished
from tests.system.harness import ROOT, EngineProcess, engine, is_gone, sim_toml, until


def test_sigterm_lets_every_stream_finish():
    with engine(sim_toml(replicas=2, step_ms=5)) as running, running.wait_ready().client() as client:
        streams = [client.stream("sim", "x", max_tokens=150, ignore_eos=True) for _ in range(10)]
        for each in streams:
            next(each)
        family = running.processes()
        running.signal(signal.SIGTERM)
        until(lambda: running.status().state == "draining", what="draining")
        refused = list(client.stream("sim", "x"))[-1]
        assert (refused.code, refused.message) == ("unavailable", "the engine is draining")
        assert all(isinstance(list(each)[-1], Finished) for each in streams)
        assert running.wait_exit() == 0
        assert all(is_gone(pid) for pid in family)


def test_a_second_sigterm_stops_now():
    with engine(sim_toml(step_ms=100)) as running, running.wait_ready().client() as client:
        stream = client.stream("sim", "x", max_tokens=3000, ignore_eos=True)
        next(stream)
        family = running.processes()
        running.signal(signal.SIGTERM)
        until(lambda: running.status().state == "draining", what="draining")
        started = time.monotonic()
        running.signal(signal.SIGTERM)
        assert running.wait_exit(3.0) == 0
        assert time.monotonic() - started < 2.0
        last = list(stream)[-1]
        assert isinstance(last, Failed)
        assert last.code == "unavailable"
        until(lambda: all(is_gone(pid) for pid in family), 5.0)


def test_a_sigterm_after_a_drain_command_does_not_cut_the_drain_short():
    """A manager of containers runs the drain command first, then sends SIGTERM as soon as the command has returned."""
    with engine(sim_toml(step_ms=5)) as running, running.wait_ready().client() as client:
        stream = client.stream("sim", "x", max_tokens=150, ignore_eos=True)
        next(stream)
        assert command("drain", running=running).returncode == 0
        running.signal(signal.SIGTERM)
        assert isinstance(list(stream)[-1], Finished)
        assert running.wait_exit() == 0


def test_a_drain_that_takes_too_long_is_cut_off():
    toml = sim_toml(step_ms=100, engine="drain_s = 0.5\nstop_grace_s = 0.5")
    with engine(toml) as running, running.wait_ready().client() as client:
        stream = client.stream("sim", "x", max_tokens=3000, ignore_eos=True)
        next(stream)
        running.signal(signal.SIGTERM)
        assert running.wait_exit(5.0) == 0
        assert isinstance(list(stream)[-1], Failed)


def test_one_replica_is_drained_and_the_rest_serves():
    with engine(sim_toml(replicas=2)) as running, running.wait_ready().client() as client:
        streams = [client.stream("sim", "x", max_tokens=100, ignore_eos=True) for _ in range(6)]
        done = command("drain", "1", running=running)
        assert done.returncode == 0, done.stderr
        assert all(isinstance(list(each)[-1], Finished) for each in streams)
        until(lambda: [each.state for each in running.replicas()] == ["ready", "stopped"], what="slot 1 stopped")
        assert client.generate("sim", "x", max_tokens=3, ignore_eos=True).reason == "length"
        assert command("drain", "9", running=running).returncode == 64


def command(*arguments: str, running: EngineProcess) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine.cli", *arguments, "--run-dir", running.run_dir],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_the_commands_an_operator_types():
    with engine(sim_toml()) as running:
        assert command("wait", "READY", "--timeout", "20", running=running).returncode == 0
        assert command("wait", "sim=READY", running=running).returncode == 0
        shown = command("status", running=running)
        assert "sim    ready" in shown.stdout
        assert '"state": "ready"' in command("status", "--json", running=running).stdout
        assert "sim-1" in command("models", running=running).stdout
        assert command("drain", running=running).returncode == 0
        assert command("wait", "STOPPED", "--timeout", "20", running=running).returncode == 0
        assert running.wait_exit() == 0
        gone = command("wait", "--timeout", "0.3", running=running)
        assert gone.returncode == 75
        assert command("status", running=running).returncode == 69


def serve(directory: Path, run_dir: str) -> subprocess.CompletedProcess[str]:
    config = directory / "engine.toml"
    config.write_text(sim_toml())
    return subprocess.run(
        [sys.executable, "-m", "engine.cli", "serve", str(config)],
        cwd=ROOT,
        env={**os.environ, "ENGINE_RUN_DIR": run_dir},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_a_living_second_instance_is_refused(tmp_path: Path):
    with engine(sim_toml()) as running:
        running.wait_ready()
        refused = serve(tmp_path, running.run_dir)
        assert refused.returncode == 69
        assert f"pid {running.pid}" in refused.stderr
        assert running.status().state == "ready"


def test_stale_sockets_are_replaced_but_a_file_is_never_deleted():
    """smg-project/smg#2076, FairRootGroup/FairMQ#222: the socket file of a dead process blocked binding for ever."""
    with engine(sim_toml()) as running:
        running.wait_ready()
        running.signal(signal.SIGKILL)
        running.wait_exit()
        assert Path(running.run_dir, "client").is_socket()
        running.start().wait_ready(5.0)
        running.signal(signal.SIGTERM)
        assert running.wait_exit() == 0
        assert not Path(running.run_dir, "client").exists()
        Path(running.run_dir, "client").write_text("precious")
        refused = serve(running.directory, running.run_dir)
        assert refused.returncode == 78
        assert "not a socket" in refused.stderr
        assert Path(running.run_dir, "client").read_text() == "precious"


def test_a_run_directory_that_is_too_long_is_named_at_once(tmp_path: Path):
    """LMCache/LMCache#3530, saltstack/salt#3036: cryptic failure or a restart loop."""
    run_dir = str(tmp_path / ("x" * 120))
    refused = serve(tmp_path, run_dir)
    assert refused.returncode == 78
    assert run_dir in refused.stderr
    assert "107" in refused.stderr


def test_a_run_directory_open_to_others_is_refused(tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o755)
    refused = serve(tmp_path, str(run_dir))
    assert refused.returncode == 78
    assert "chmod 700" in refused.stderr


RELOADS = [
    (("step_ms = 2.0", "step_mss = 2.0"), False, "step_mss"),
    (('route = "sim"', 'route = "other"'), False, "deployment"),
    (("drain_s = 20", 'log_level = "debug"'), False, "engine.log_level"),
    (("max_queued = 9", "max_queued = 77"), True, "deployment[0].queue.max_queued (live)"),
    (("num_blocks = 2048", "num_blocks = 1024"), True, "deployment[0].llm.num_blocks (replica)"),
]


def test_a_reload_is_applied_or_refused_whole():
    with engine(sim_toml(queue="max_queued = 9", engine="drain_s = 20")) as running:
        running.wait_ready()
        text = running.toml
        for number, (change, is_applied, named) in enumerate(RELOADS, 1):
            before = running.status().config_hash
            running.config_path.write_text(text.replace(*change))
            running.signal(signal.SIGHUP)
            until(lambda number=number: len(reloads(running)) == number, what="the reload is logged")
            assert named in reloads(running)[-1]
            if is_applied:
                text = text.replace(*change)
                until(lambda before=before: running.status().config_hash != before, what="another configuration")
            assert (running.status().config_hash != before) == is_applied
            assert running.status().state == "ready"
        pid = running.replicas()[0].pid
        os.kill(pid, signal.SIGKILL)  # a replica's own settings count from its next start
        until(lambda: running.replicas()[0].num_blocks == 1024, what="the new number of blocks")


def reloads(running: EngineProcess) -> list[str]:
    return [each for each in running.log().splitlines() if "event=reload" in each]
