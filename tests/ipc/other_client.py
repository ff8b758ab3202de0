#!/usr/bin/env python3
"""A second client, written from ipc/README.md alone with plain zmq and msgpack: it imports nothing of the engine.

    python tests/ipc/other_client.py ADDRESS ROUTE PROMPT [--max-tokens N] [--seed S]

Prints the text; exits with 1 and a message when anything is not as the specification says.
"""

import argparse
import sys

import msgpack
import zmq

HELLO, GENERATE, CANCEL, MODELS, STATUS, BYE = 1, 2, 3, 4, 5, 7
WELCOME, EVENTS, MODEL_LIST, STATUS_REPORT, PONG, ERROR = 17, 18, 19, 20, 21, 22


def need(is_so, why):
    if not is_so:
        sys.exit(f"other_client: {why}")


def send(socket, kind, head=None, body=None):
    socket.send_multipart([b"EN" + bytes([1, kind, 0]), msgpack.packb(head or {}), msgpack.packb(body or {})])


def receive(socket, *wanted):
    while True:
        need(socket.poll(5000), f"nothing came while waiting for kind {wanted}")
        envelope, head, body = socket.recv_multipart()
        need(envelope[:3] == b"EN\x01" and len(envelope) == 5, f"strange envelope {envelope!r}")
        if envelope[3] in wanted:
            return envelope[3], msgpack.unpackb(head), body
        need(envelope[3] != ERROR, f"error {body!r}")


def events(socket):
    _, head, body = receive(socket, EVENTS)
    need(sum(head["lengths"]) == len(body), "lengths do not add up")
    at = 0
    for length in head["lengths"]:
        yield msgpack.unpackb(body[at : at + length])
        at += length


def generate(socket, name, route, body):
    send(socket, GENERATE, {"request": name, "route": route}, body)


def collect(socket, name):
    """Text, ids and the final event of one request; checks that no id is missing or doubled."""
    text, ids = "", []
    while True:
        for event in events(socket):
            need(event["request"] == name, f"an event of {event['request']}")
            if event["type"] in ("delta", "finished"):
                need(event["index"] == len(ids), f"index {event['index']} after {len(ids)} ids")
                text += event["text"]
                ids += event["ids"]
            if event["type"] != "delta":
                return text, ids, event


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("route")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(asked.address)
    send(socket, HELLO, body={"client": "other"})
    _, _, welcome = receive(socket, WELCOME)
    need(msgpack.unpackb(welcome)["major"] == 1, "another major version")
    send(socket, MODELS)
    _, _, models = receive(socket, MODEL_LIST)
    need(asked.route in [model["route"] for model in msgpack.unpackb(models)["models"]], "no such route")
    send(socket, STATUS)
    _, _, status = receive(socket, STATUS_REPORT)
    need(msgpack.unpackb(status)["counters"]["num_sessions"] >= 1, "a status without this session")
    generate(socket, "endless", asked.route, {"prompt": asked.prompt, "max_tokens": 1000, "ignore_eos": True})
    need(next(events(socket))["type"] == "delta", "the first event is a delta")
    send(socket, CANCEL, {"request": "endless"})
    while True:
        last = list(events(socket))[-1]
        if last["type"] != "delta":
            break
    need(last["type"] == "cancelled", f"cancelled, not {last}")
    options = {"max_tokens": asked.max_tokens, "seed": asked.seed, "ignore_eos": True}
    generate(socket, "real", asked.route, {"prompt": asked.prompt, **options})
    text, ids, end = collect(socket, "real")
    need(end["type"] == "finished" and end["reason"] == "length", f"an odd end: {end}")
    need(len(ids) == end["usage"]["completion_tokens"] == asked.max_tokens, "a wrong count")
    send(socket, GENERATE, {"request": "bad", "route": asked.route}, {"prompt": 7})
    need(next(events(socket))["field"] == "prompt", "a wrong prompt is named")
    send(socket, BYE)
    print(text)
    context.destroy(linger=200)


main()
