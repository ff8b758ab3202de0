"""Owns what the sessions share: their arguments, a claim that must hold, and the JSON line they end with.

Runs inside a client's environment: standard library only, and nothing of the engine.
"""

import argparse
import json
import sys
from typing import Any, NoReturn


def arguments(*more: str) -> argparse.Namespace:
    """The engine's URL, the model's name, and the options a session has beyond them, each needed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    for name in more:
        parser.add_argument(f"--{name}", required=True)
    return parser.parse_args()


def fail(message: str) -> NoReturn:
    """End the session: something was not as it should be."""
    sys.exit(f"DEVIATION: {message}")


def expect(claim: object, message: str, *seen: object) -> None:
    """Go on if the claim holds; else end the session, showing what was seen."""
    if not claim:
        fail(f"{message}: {' '.join(map(repr, seen))}" if seen else message)


def equal(seen: object, wanted: object, what: str) -> None:
    """Go on if both are equal."""
    expect(seen == wanted, f"{what} is {seen!r}, not {wanted!r}")


def report(**told: Any) -> None:
    """The last line: what was seen, for the test to look at."""
    print(json.dumps(told))
