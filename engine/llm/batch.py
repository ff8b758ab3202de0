"""Owns the way from a step to the rows a runner takes. Knows no device. Called by the worker's loop."""

from engine.llm.runner import PENDING_TOKEN, Row
from engine.llm.scheduler import Step


def rows(step: Step) -> list[Row]:
    """One Row per chunk, in order. A token that is still on the device is PENDING_TOKEN. Changes nothing."""
    result = []
    for chunk in step.chunks:
        sequence, start = chunk.sequence, chunk.start
        token_ids = sequence.token_ids[start : start + chunk.length]
        if len(token_ids) < chunk.length:
            token_ids.append(PENDING_TOKEN)
        row = Row(
            sequence.seat,
            start,
            token_ids,
            sequence.block_table,
            sequence.num_prompt_tokens,
            sequence.seed,
            sequence.choice,
            chunk.is_sampled,
            sequence.sampling,
            sequence.token_ids,
        )
        if sequence.min_tokens:
            row.banned = sequence.banned_ids(start + chunk.length - sequence.num_prompt_tokens)
        row.num_logprobs = sequence.num_logprobs
        if sequence.is_scored:
            row.targets = sequence.token_ids[start + 1 : min(start + chunk.length + 1, sequence.num_prompt_tokens)]
        result.append(row)
    return result
