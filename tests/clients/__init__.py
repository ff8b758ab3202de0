"""Sessions of third-party clients against a real engine: slow tier, `bin/test -m slow tests/clients`.

Each client has an environment of its own in `$XDG_CACHE_HOME or ~/.cache` + `/engine-tests/clients/NAME-VERSION`, made
by the first run with the versions of `versions.toml` and kept; `python -m tests.clients.environments` makes them ahead.
A client that cannot be installed, as without a network, is skipped with the reason; one that is there must pass.

A session, `sessions/*`, runs inside its client's environment with the engine's URL and a model's name. It ends with one
JSON line of what it saw, or says what differs and exits with another code than 0. `pytest -s` shows those lines.
"""
