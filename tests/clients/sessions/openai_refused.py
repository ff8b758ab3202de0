"""The openai package against an engine that refuses: no key, a full queue, a worker that dies.

`keys`: a wrong key is an AuthenticationError at once. `full`: a full queue is a 503 that the package tries again after
the Retry-After it was told. `whole`, `stream`: one request is running when the test ends its worker; whole it is tried
again and answered, a stream that has begun ends with an error.
"""

import time
from typing import Any

import httpx2
import openai
from shared import arguments, equal, expect, fail, report

BODY: Any = {"ignore_eos": True}
SLACK_S = 5.0  # of a busy machine


class Watched:
    """A client whose requests and answers are noted; `on_refusal` runs when one is a 503."""

    def __init__(self, url: str, key: str, max_retries: int, on_refusal: Any = None) -> None:
        self.answers: list[tuple[int, float]] = []  # status, seconds to wait that were told
        self.pauses: list[float] = []  # seconds from each answer to the request after it
        self._answered_at = 0.0
        self._on_refusal = on_refusal
        hooks = {"request": [self._sent], "response": [self._answered]}
        self.client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=max_retries,
            timeout=60,
            http_client=openai.DefaultHttpxClient(event_hooks=hooks),
        )

    def _sent(self, _: httpx2.Request) -> None:
        if self.answers:
            self.pauses.append(time.monotonic() - self._answered_at)

    def _answered(self, response: httpx2.Response) -> None:
        wait_s = float(response.headers.get("retry-after-ms", 0)) / 1e3
        if response.status_code == 503 and self._on_refusal is not None:
            self._on_refusal()
        self.answers.append((response.status_code, wait_s))
        self._answered_at = time.monotonic()

    def waited(self) -> float:
        """Seconds from a 503 to the request after it, which was served: what was told, or more."""
        equal([status for status, _ in self.answers], [503, 200], "the answers")
        told_s = self.answers[0][1]
        expect(told_s > 0, "no time to come back was told", self.answers)
        expect(told_s <= self.pauses[0] < told_s + SLACK_S, "tried again at another time", self.pauses, self.answers)
        return self.pauses[0]


def keys(url: str, model: str, key: str) -> None:
    """A wrong key is refused once, a right one is served."""
    watched = Watched(url, "wrong", 2)
    try:
        watched.client.models.list()
    except openai.AuthenticationError as error:
        equal((error.status_code, error.code), (401, "invalid_api_key"), "error of a wrong key")
    else:
        fail("a wrong key was served")
    equal(len(watched.answers), 1, "requests with a wrong key")
    equal([each.id for each in Watched(url, key, 0).client.models.list()], [model], "models of a right key")
    report(answers=watched.answers)


def full(url: str, model: str, key: str) -> None:
    """One seat and one place to wait: the third is refused, and served once the first has gone."""
    plain = Watched(url, key, 0).client

    def long() -> Any:
        return plain.completions.create(model=model, prompt="x", max_tokens=3000, stream=True, extra_body=BODY)

    first = long()
    next(iter(first))
    second = long()  # its headers come while it waits
    asked: dict[str, Any] = {"model": model, "prompt": "y", "max_tokens": 3, "extra_body": BODY}
    try:
        plain.completions.create(**asked)
    except openai.InternalServerError as error:
        equal((error.status_code, error.code), (503, "overloaded"), "error of a full queue")
        expect(float(error.response.headers["retry-after"]) >= 1, "Retry-After", error.response.headers)
    else:
        fail("a third request was served")

    def leave() -> None:
        first.close()
        second.close()

    watched = Watched(url, key, 2, leave)
    equal(watched.client.completions.create(**asked).usage.completion_tokens, 3, "tokens after a retry")
    report(answers=watched.answers, waited_s=watched.waited())


def whole(url: str, model: str, key: str) -> None:
    """Its worker dies while it runs, and there is no other: a 503, tried again, then served."""
    watched = Watched(url, key, 5)
    told = watched.client.completions.create(model=model, prompt="x", max_tokens=800, extra_body=BODY)
    equal(told.usage.completion_tokens, 800, "tokens after a retry")
    report(answers=watched.answers, waited_s=watched.waited())


def stream(url: str, model: str, key: str) -> None:
    """The same in a stream: an APIError with the engine's code, no second request, and the next one is served."""
    watched = Watched(url, key, 2)
    num_parts = 0
    try:
        for _ in watched.client.completions.create(
            model=model, prompt="x", max_tokens=3000, stream=True, extra_body=BODY
        ):
            num_parts += 1
    except openai.APIError as error:
        equal(error.code, "worker_lost", "error of a stream whose worker died")
    else:
        fail("a stream without a worker ended as if it were whole")
    equal(len(watched.answers), 1, "requests of a stream")
    told = watched.client.completions.create(model=model, prompt="x", max_tokens=3, extra_body=BODY)
    equal(told.usage.completion_tokens, 3, "tokens afterwards")
    report(num_parts=num_parts)


def main() -> None:
    """One of the four."""
    told = arguments("key", "way")
    {"keys": keys, "full": full, "whole": whole, "stream": stream}[told.way](told.url, told.model, told.key)


main()
