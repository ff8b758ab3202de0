"""lm-eval: small local tasks by `local-completions` against the engine and by `hf` on the folder it reads: the same.

A multiple choice, whose likelihoods come of echoed prompts with logprobs, a perplexity, and a greedy generation.
"""

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from shared import arguments, equal, expect, report

TOLERANCE = 1e-3
# Words that differ in one letter, in several, in length, and outside of ASCII, where a letter is several tokens.
QUESTIONS = [
    ("The sky is", [" blue", " bleu", " green and loud"], 0),
    ("ab ab ab", [" ab", " a", " b", " ba"], 0),
    ("2 + 2 =", [" 3", " 4", " 5"], 1),
    ("Wie heißt die Stadt an der Düna?", [" Riga", " Rīga", " Köln"], 1),
    ("日本の首都は", ["東京", "大阪", "é", "ñ"], 0),
    ("A long story: " + "once upon a time, " * 20, [" the end", " and so on"], 1),
    ("x", [" y", "é", "ü", "ж", "€"], 2),
    ("One\ntwo\n", ["three", "four"], 0),
    ("bc", ["C", "D"], 0),  # the first is what the tiny model says by itself
]
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
PERPLEXITY = """
task: perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: byte_perplexity
"""
GENERATION = """
task: generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list:
  - metric: exact_match
"""
TASKS = {"choice": CHOICE, "perplexity": PERPLEXITY, "generation": GENERATION}


def write_tasks(folder: Path) -> TaskManager:
    """The tasks and their data, as files."""
    folder.mkdir()
    data = folder / "questions.json"
    rows = [{"question": question, "choices": choices, "answer": at} for question, choices, at in QUESTIONS]
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(kind: str, manager: TaskManager, **model_args: Any) -> dict[str, Any]:
    """Results and samples of one kind of model."""
    done = simple_evaluate(
        model=kind,
        model_args=model_args,
        tasks=list(TASKS),
        task_manager=manager,
        batch_size=4,
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )
    expect(done is not None, "nothing was evaluated")
    return dict(done)


def answers(done: dict[str, Any], task: str) -> list[Any]:
    """What a model said, by document."""
    samples = sorted(done["samples"][task], key=lambda sample: sample["doc_id"])
    return [each[0] for sample in samples for each in sample["resps"]]


def likelihoods_agree(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference; whether a choice is the greedy one must be equal."""
    equal(len(ours), len(theirs), "number of likelihoods")
    apart = [abs(float(our[0]) - float(their[0])) for our, their in zip(ours, theirs, strict=True)]
    expect(max(apart) <= TOLERANCE, "loglikelihoods differ", apart)
    greedy = [str(their[1]) for their in theirs]
    equal([str(our[1]) for our in ours], greedy, "what is greedy")
    expect("True" in greedy, "no choice is greedy: nothing was compared")
    return max(apart)


def main() -> None:
    """Both models on all tasks."""
    told = arguments("folder")
    manager = write_tasks(Path("tasks").resolve())
    theirs = evaluated("hf", manager, pretrained=told.folder, dtype="float32")
    ours = evaluated(
        "local-completions",
        manager,
        model=told.model,
        base_url=f"{told.url}/v1/completions",
        tokenizer=told.folder,
        tokenizer_backend="huggingface",
        max_length=1024,
        num_concurrent=4,
        max_retries=1,
    )
    apart = likelihoods_agree(answers(ours, "choice"), answers(theirs, "choice"))
    for metric in ("acc,none", "acc_norm,none"):
        equal(ours["results"]["choice"][metric], theirs["results"]["choice"][metric], metric)
    rolled = [[float(each) for each in answers(done, "perplexity")] for done in (ours, theirs)]
    expect(
        all(math.isclose(our, their, rel_tol=1e-5, abs_tol=TOLERANCE) for our, their in zip(*rolled, strict=True)),
        "likelihoods of whole texts differ",
        *rolled,
    )
    equal(answers(ours, "generation"), answers(theirs, "generation"), "greedy texts")
    report(
        version=version("lm-eval"),
        num_likelihoods=len(answers(ours, "choice")),
        apart=apart,
        acc=ours["results"]["choice"]["acc,none"],
        byte_perplexity=ours["results"]["perplexity"]["byte_perplexity,none"],
        texts=answers(ours, "generation"),
    )


main()
