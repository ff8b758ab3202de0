"""Owns the set-up that `bin/*` share, and what the files beside it promise: tried on a copy, with a wheel made here.

Knows no network: pip is given a folder, an empty folder, or a port that never answers. Leaves this `.venv` alone.
"""

import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("bin/engine", "bin/test", "bin/check", "bin/setup.sh", ".ci/run")
DEADLINE_S = 60
PROJECT = """
[project]
dependencies = ["tiny>=0.1"]
[project.optional-dependencies]
server = []
[dependency-groups]
test = ["tiny"]
check = []
"""
# Stands for an interpreter of a distribution that splits parts of it off: whatever names {word} fails.
WITHOUT = '#!/bin/sh\ncase "$*" in *"{word}"*) exit 1;; esac\nexec "{python}" "$@"\n'


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def make_wheel(folder: Path) -> None:
    """`tiny` 1.0, one module; and 2.0, which the constraints must keep away."""
    for version in ("1.0", "2.0"):
        info = f"tiny-{version}.dist-info"
        with zipfile.ZipFile(folder / f"tiny-{version}-py3-none-any.whl", "w") as wheel:
            module = f'VERSION = "{version}"\n'
            wheel.writestr("tiny.py", module)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(
                f"{info}/RECORD", f"tiny.py,,{len(module)}\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
            )


class Tree:
    """A copy of the scripts around a project of one dependency."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "a tree"
        self.wheels = folder / "wheels"
        self.empty = folder / "empty"

    def make(self) -> "Tree":
        for path in (self.root / "engine", self.wheels, self.empty):
            path.mkdir(parents=True)
        shutil.copytree(ROOT / "bin", self.root / "bin")
        (self.root / "pyproject.toml").write_text(PROJECT)
        (self.root / "constraints.txt").write_text("tiny==1.0\n")
        (self.root / "engine" / "__init__.py").touch()
        (self.root / "engine" / "cli.py").write_text("import sys, tiny\nprint(tiny.VERSION, sys.argv[1:])\n")
        make_wheel(self.wheels)
        return self

    def environment(self, **changed: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            # Without ensurepip: the quicker of the two ways, and the rarer one.
            "ENGINE_PYTHON": str(self.python("ensurepip")),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            **changed,
        }

    def python(self, word: str) -> Path:
        return script(self.folder / f"python-without-{word}", WITHOUT.format(word=word, python=sys.executable))

    def start(self, *arguments: str, command: Path | None = None, **changed: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [command or self.root / "bin" / "engine", *arguments],
            cwd=self.folder,
            env=self.environment(**changed),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A runner in the background ignores SIGINT, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str, command: Path | None = None, **changed: str) -> tuple[int, str, str]:
        return finish(self.start(*arguments, command=command, **changed))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stdout, stderr


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path).make()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Set up once. Take a copy."""
    tree = Tree(tmp_path_factory.mktemp("made")).make()
    code, stdout, stderr = tree.run("serve", "x y")
    assert (code, stdout) == (0, "1.0 ['serve', 'x y']\n"), stderr
    assert "making .venv with Python 3" in stderr
    assert stderr.endswith("engine: ready.\n")
    return tree


@pytest.fixture
def ready(made: Tree, tmp_path: Path) -> Tree:
    shutil.copytree(made.folder, tmp_path / "copy", symlinks=True)
    return Tree(tmp_path / "copy")


def site_packages(tree: Tree) -> Path:
    return next((tree.root / ".venv" / "lib").glob("python*/site-packages"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_bash_cannot_read(name: str) -> None:
    assert subprocess.run(["bash", "-n", ROOT / name], check=False).returncode == 0
    assert name.endswith(".sh") or os.access(ROOT / name, os.X_OK)


def test_a_tree_that_was_copied_elsewhere_asks_nobody(ready: Tree) -> None:
    code, stdout, stderr = ready.run("--help", PIP_FIND_LINKS=str(ready.empty))
    assert (code, stdout, stderr) == (0, "1.0 ['--help']\n", "")


def test_called_by_a_link_from_a_folder_with_another_engine_in_it(ready: Tree) -> None:
    (ready.folder / "engine").mkdir()
    (ready.folder / "engine" / "__init__.py").write_text("raise SystemExit('the wrong engine')\n")
    link = ready.folder / "link"
    link.symlink_to(ready.root / "bin" / "engine")
    assert ready.run(command=link)[:2] == (0, "1.0 []\n")


def test_changed_requirements_are_installed_by_the_next_run(ready: Tree) -> None:
    (ready.root / "constraints.txt").write_text("tiny==2.0\n")
    assert ready.run()[:2] == (0, "2.0 []\n")


def test_offline_says_what_failed_and_what_to_do(tree: Tree) -> None:
    code, stdout, stderr = tree.run(PIP_FIND_LINKS=str(tree.empty))
    assert (code, stdout) == (69, "")
    assert re.search("^ERROR: .*tiny", stderr, re.MULTILINE)
    for advice in (
        "connect to the network",
        "PIP_INDEX_URL",
        "PIP_FIND_LINKS",
        "install by hand",
        "-c constraints.txt",
    ):
        assert advice in stderr
    by_hand = stderr.partition("or install by hand: ")[2].strip()
    assert (
        subprocess.run(["bash", "-c", by_hand], env=tree.environment(), capture_output=True, check=False).returncode
        == 0
    )
    code, stdout, stderr = tree.run(PIP_FIND_LINKS=str(tree.empty))
    assert (code, stdout) == (0, "1.0 []\n"), stderr


def test_interrupted_and_run_again(ready: Tree) -> None:
    (ready.root / "constraints.txt").write_text("tiny==2.0\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE_S)
        where = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple"}
        process = ready.start(**where, PIP_FIND_LINKS="")
        with silent.accept()[0]:
            os.killpg(process.pid, signal.SIGINT)
            code, stdout, stderr = finish(process)
    assert (code, stdout) == (130, "")
    assert "interrupted; run the same command again" in stderr
    assert ready.run()[:2] == (0, "2.0 []\n")


def test_two_started_at_once_install_once(tree: Tree) -> None:
    first, second = (finish(each) for each in (tree.start("a"), tree.start("b")))
    assert [each[:2] for each in (first, second)] == [(0, "1.0 ['a']\n"), (0, "1.0 ['b']\n")]
    assert (first[2] + second[2]).count("installing ") == 1


def test_files_that_an_interrupt_left_cut_off_are_replaced(ready: Tree) -> None:
    (site_packages(ready) / "tiny.py").write_text("")
    (ready.root / ".venv" / ".unfinished").write_text("packages")
    (ready.root / ".venv" / ".stamp-server").unlink()
    code, stdout, stderr = ready.run()
    assert (code, stdout) == (0, "1.0 []\n"), stderr
    assert "left .venv damaged" in stderr


def test_whole_files_are_kept_after_an_interrupt(ready: Tree) -> None:
    (ready.root / ".venv" / ".unfinished").write_text("packages")
    (ready.root / ".venv" / ".stamp-server").unlink()
    code, stdout, stderr = ready.run(PIP_FIND_LINKS=str(ready.empty))
    assert (code, stdout) == (0, "1.0 []\n"), stderr
    assert "making .venv" not in stderr


def test_an_interpreter_that_was_removed_is_replaced(ready: Tree) -> None:
    python = ready.root / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(ready.folder / "removed")
    code, stdout, stderr = ready.run()
    assert (code, stdout) == (0, "1.0 []\n"), stderr


def test_a_python_that_is_too_old_is_named(tree: Tree) -> None:
    old = script(tree.folder / "old", '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.18\nexit 1\n')
    code, stdout, stderr = tree.run(ENGINE_PYTHON=str(old))
    assert (code, stdout) == (69, "")
    assert "3.11 or newer is needed; found" in stderr
    assert "Python 3.9.18" in stderr


def test_a_python_without_venv_says_what_to_install(tree: Tree) -> None:
    code, stdout, stderr = tree.run(ENGINE_PYTHON=str(tree.python("-m venv")))
    assert (code, stdout) == (69, "")
    assert "apt install python3-venv" in stderr


def test_failing_tests_fail_without_assertions_too(tmp_path: Path) -> None:
    """What bin/test relies on when it runs tests under -O."""
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert 1 == 2\n")
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-W", "ignore:assertions not in test modules"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run([*command, tmp_path], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 failed" in ended.stdout


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in found}


def requirements() -> list[Requirement]:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, groups = tables["project"], tables["dependency-groups"]
    server = project["optional-dependencies"]["server"]
    return [Requirement(each) for each in project["dependencies"] + server + groups["test"] + groups["check"]]


def test_constraints_pin_everything_that_is_installed() -> None:
    pinned, pending, seen = pins(), requirements(), set[str]()
    while pending:
        requirement = pending.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{requirement} is not in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} against {pinned[name]}"
        if name not in seen:
            seen.add(name)
            more = [Requirement(each) for each in importlib.metadata.requires(name) or []]
            # A build of torch for CUDA brings libraries that it pins itself; the pins here serve every build.
            pending += [each for each in more if name != "torch" or "platform_system" not in str(each.marker)]
    assert set(pinned) == seen


def test_constraints_name_no_host_and_no_build() -> None:
    assert not re.search(r"://|\+|--|@", (ROOT / "constraints.txt").read_text())


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
