"""Owns how often Python looks for cycles in a process that lives long. Knows nothing else. Called once, at start."""

import gc


def quiet_gc() -> None:
    """Everything imported so far is permanent, and requests form no cycles: collect rarely, and not what lives on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
