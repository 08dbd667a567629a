"""Answers generated in slots are the target's own, whatever shares the batch; killed runs leave the same file."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

import tiny
import tiny_training as setup
from fake_cuda import CUDA, fake_cuda, on_cuda
from whiflash import journal
from whiflash.errors import WhiFlashError
from whiflash.nn import kernel
from whiflash.nn.cache import KVCache
from whiflash.target.config import TargetConfig
from whiflash.target.decoder import Decoder
from whiflash.target.load import load_target
from whiflash.training import synthesize
from whiflash.training.slots import Job, SlotCache, _Engine, _Slot, generate
from whiflash.training.synthesize import (
    DataRecipe,
    Prompt,
    common_prefix,
    make_data,
    question,
    read_prompts,
    repeats,
    user_turn,
)

TEXTS = [f"{word} {number}?" for number in range(3) for word in ("a", "bread and butter", "why", "count " * 9)]
KEYS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
RECIPE = DataRecipe(max_tokens=20, slots=5, synthesise=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return setup.target(tmp_path_factory.mktemp("data"))


def one_by_one(target, prompt, count):
    answer = setup.continuation(target, target.encode(prompt), count)
    ends = [i for i, token in enumerate(answer) if token in target.stop_ids]
    return answer[: ends[0] + 1] if ends else answer


def write_prompts(path, texts=TEXTS):
    rows = [{"category": ("chat", "math")[i % 2], "turns": [text, "and then?"]} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("llama", {"head_dim": 32}), ("qwen3", {}), ("mistral", {"sliding_window": 24})],
    ids=lambda v: str(v),
)
def test_slots_answer_as_one_sequence_does(tmp_path, family, options):
    target = load_target(tiny.build(tmp_path / family, family, **options))
    jobs = [Job(target.encode(text), 8 + 5 * i) for i, text in enumerate(TEXTS)]
    answers = list(generate(target, jobs, slots=5))
    assert answers == [one_by_one(target, text, 8 + 5 * i) for i, text in enumerate(TEXTS)]
    assert len({len(a) for a in answers}) > 3, "the lengths must differ for slots to be refilled at different times"


def test_a_shared_prefix_changes_nothing(target):
    jobs = [Job(target.encode(text), 30) for text in TEXTS]
    prefix = common_prefix([list(job.tokens) for job in jobs])
    assert len(prefix) > 20
    assert list(generate(target, jobs, slots=4, prefix=prefix)) == list(generate(target, jobs, slots=4))


def test_other_networks_decode_one_at_a_time(target):
    other = load_target(target.path, runtime=False)
    jobs = [Job(target.encode(text), 12) for text in TEXTS[:4]]
    assert list(generate(other, jobs, slots=4)) == list(generate(target, jobs, slots=4))


def test_an_answer_of_one_token_and_of_none(target):
    tokens = target.encode(TEXTS[0])
    first = one_by_one(target, TEXTS[0], 1)
    assert list(generate(target, [Job(tokens, 1), Job(tokens, 0), Job(tokens, 1)], slots=2)) == [first, [], first]
    assert list(generate(target, [Job(tokens, 9)], slots=2, stops=first)) == [first]


def test_samples_depend_on_their_seed_alone(target):
    jobs = [Job(target.encode(text), 20, 0.9, seed) for seed, text in enumerate(TEXTS)]
    answers = list(generate(target, jobs, slots=5))
    assert list(generate(target, jobs[::-1], slots=3))[::-1] == answers
    assert list(generate(target, [Job(job.tokens, 20, 0.9, 99) for job in jobs], slots=5)) != answers


def test_noise_picks_by_the_distribution():
    logits = torch.tensor([[1.0, 3.0, -2.0, 2.0]])
    temperature, draws = 0.7, 1000
    noise = torch.linspace(0, 1, draws + 1, dtype=torch.float64)[:-1]
    slots = [_Slot(0, Job([0], 1, temperature), [], noise[i : i + 1]) for i in range(draws)]
    picked = _Engine._pick(logits.expand(draws, -1), slots)
    share = torch.bincount(torch.tensor(picked), minlength=4) / draws
    assert torch.allclose(share, (logits[0] / temperature).softmax(0), atol=2 / draws)


def test_a_slot_never_sees_another_or_its_predecessor(target):
    cache = SlotCache(target.network.new_cache(8), 3)
    cache.library = None
    cache.lengths = [2, 0, 70]
    cache.commit()
    assert cache.length == 128, "lengths are rounded up"
    seen = cache.mask(1)[:, 0, 0] == 0
    assert seen.sum(1).tolist() == [3, 1, 71]
    assert all(row[: int(row.sum())].all() for row in seen)
    windowed = cache.mask(1, window=2)[:, 0, 0] == 0
    assert [row.nonzero().flatten().tolist() for row in windowed] == [[1, 2], [0], [69, 70]]


@pytest.mark.skipif(kernel.load() is None, reason="no C compiler")
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_the_kernel_attends_to_each_slots_own_rows(dtype, off):
    torch.manual_seed(0)
    cache = SlotCache(KVCache(1, 3, 64, 8, dtype, "cpu"), 4)
    cache.lengths = [5, 0, 150, 63]
    cache.commit()
    cache.rows.normal_()
    q, k, v = (torch.randn(4, heads, 1, 64, dtype=dtype) for heads in (9, 3, 3))
    keys, values = cache.append(0, k, v)
    out = cache.attend(q, keys, values, cache.mask(1))
    for slot, length in enumerate(cache.lengths):
        seen = [t[slot : slot + 1, :, : length + 1].double() for t in (keys, values)]
        exact = F.scaled_dot_product_attention(q[slot : slot + 1].double(), *seen, enable_gqa=True)
        torch.testing.assert_close(out[slot : slot + 1].double(), exact, rtol=0, atol=off)


def test_the_same_seed_writes_the_same_file(target, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    files = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        assert make_data(target, file, DataRecipe(**{**vars(RECIPE), "seed": seed}), [prompts]) == len(TEXTS) + 3
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert {row["category"] for row in rows} >= {"chat", "math"}
    for row in rows:
        assert row["response_ids"] == one_by_one(target, row["prompt"], 20)
    questions = [json.loads(line) for line in (tmp_path / "a.questions.jsonl").read_text().splitlines()]
    assert {q["turns"][0] for q in questions} | set(TEXTS) == {row["prompt"] for row in rows}
    assert len(read_prompts([tmp_path / "a.questions.jsonl"])) == 3, "questions are prompts for another run"


class Stopped(Exception):
    pass


def test_a_stopped_run_goes_on_to_the_same_file(target, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    make_data(target, tmp_path / "plain.jsonl", RECIPE, [prompts])
    out, rng, calls = tmp_path / "out.jsonl", random.Random(0), 0
    for _ in range(100):
        left = rng.randint(1, 6)

        def dying(status):
            nonlocal left
            left -= 1
            if left < 0:
                raise Stopped

        calls += 1
        try:
            make_data(target, out, RECIPE, [prompts], report=dying)
        except Stopped:
            file = out if out.exists() else out.with_name("out.questions.jsonl")
            if file.exists():
                with file.open("a") as f:
                    f.write('{"category": "chat", "pro')  # what a kill in the middle of a row leaves
            continue
        break
    assert calls > 4
    for name in ("jsonl", "questions.jsonl"):
        assert (tmp_path / f"out.{name}").read_bytes() == (tmp_path / f"plain.{name}").read_bytes()


@pytest.mark.slow
def test_kill_at_random_moments(target, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", [f"{i} {text}" for i in range(5) for text in TEXTS])
    make_data(target, tmp_path / "plain.jsonl", RECIPE, [prompts])
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "from whiflash.target.load import load_target\n"
        "from whiflash.training.synthesize import DataRecipe, make_data\n"
        "target = load_target(sys.argv[1])\n"
        "tell = lambda status: print(status.done, flush=True)\n"
        f"make_data(target, sys.argv[2], {RECIPE!r}, [sys.argv[3]], report=tell)\n"
        "print('end', flush=True)\n"
    )
    source = Path(__file__).parents[1] / "src"
    rng, kills, finished = random.Random(1), 0, False
    while not finished:
        run = subprocess.Popen(
            [sys.executable, str(script), str(target.path), str(tmp_path / "out.jsonl"), str(prompts)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        )
        for line in (run.stdout.readline() for _ in range(rng.randint(1, 5) if kills < 10 else 10**6)):
            finished = line == "end\n"
            if finished or not line:
                break
        run.send_signal(signal.SIGKILL)
        run.wait()
        run.stdout.close()
        kills += not finished
    assert kills > 4, "it may finish early, for it runs ahead of what is read from it"
    for name in ("jsonl", "questions.jsonl"):
        assert (tmp_path / f"out.{name}").read_bytes() == (tmp_path / f"plain.{name}").read_bytes()


def test_more_answers_extend_the_file(target, tmp_path):
    prompts, out = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out.jsonl"
    small = DataRecipe(max_tokens=8, slots=4, count=4)
    assert make_data(target, out, small, [prompts]) == 4
    before = out.read_bytes()
    assert make_data(target, out, small, [prompts]) == 4
    assert out.read_bytes() == before
    assert make_data(target, out, DataRecipe(max_tokens=8, slots=4), [prompts]) == len(TEXTS)
    assert out.read_bytes().startswith(before)
    assert len({json.loads(line)["prompt"] for line in out.read_text().splitlines()}) == len(TEXTS)


def test_out_of_time_is_not_out_of_luck(target, tmp_path):
    prompts, out = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out.jsonl"
    recipe = DataRecipe(max_tokens=8, slots=2)
    rows, calls = 0, 0
    while rows < len(TEXTS):
        more = make_data(target, out, recipe, [prompts], seconds=0)
        assert more > rows, "every call answers something"
        rows, calls = more, calls + 1
    assert calls > 2


def test_questions_leave_time_for_answers(target, tmp_path):
    out, recipe = tmp_path / "out.jsonl", DataRecipe(max_tokens=8, slots=2, synthesise=10)
    while not (rows := make_data(target, out, recipe, seconds=0)):
        pass
    assert rows == len((tmp_path / "out.questions.jsonl").read_text().splitlines()) == 1


def test_no_answer_begins_after_the_time(target, tmp_path, monkeypatch):
    """Answers come out in order, so one that takes long must not keep the clock from being looked at."""
    prompts, now, begun = write_prompts(tmp_path / "prompts.jsonl"), [0.0], []
    monkeypatch.setattr(synthesize.time, "monotonic", lambda: now[0])
    start, step = _Engine.start, _Engine.step

    def started(self, place, number, job, done):
        begun.append(now[0])
        return start(self, place, number, job, done)

    def stepped(self, done):
        now[0] += 1
        return step(self, done)

    monkeypatch.setattr(_Engine, "start", started)
    monkeypatch.setattr(_Engine, "step", stepped)
    rows = make_data(target, tmp_path / "out.jsonl", DataRecipe(max_tokens=30, slots=2), [prompts], seconds=3)
    assert rows == len(begun), "what was begun is finished"
    assert max(begun) <= 3 and now[0] <= 3 + 30
    assert rows < len(TEXTS)


def test_excluded_and_repeated_prompts_are_left_out(target, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["What is a sea?", "what is  a SEA", "What is a lake?"])
    exclude = write_prompts(tmp_path / "exclude.jsonl", ["WHAT is a lake"])
    assert [p.text for p in read_prompts([prompts])] == ["What is a sea?", "What is a lake?"]
    make_data(target, tmp_path / "out.jsonl", DataRecipe(max_tokens=4), [prompts], [exclude])
    assert [json.loads(r)["prompt"] for r in (tmp_path / "out.jsonl").read_text().splitlines()] == ["What is a sea?"]


def test_the_system_text_is_the_templates_own(target):
    text = target.tokenizer.decode(target.encode("hello"))
    assert tiny.SYSTEM in text
    before, ends = user_turn(target, "Be brief.")
    assert target.tokenizer.decode(before).endswith("<|im_start|>user\n")
    assert "Be brief." in target.tokenizer.decode(before)
    assert ends == target.stop_ids


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("How do I bake a good bread?", True),
        ("Why?", False),
        ("x" * 200, False),
        ("tell me, tell me, tell me, tell me now", False),
        ("one two three. one two three. one two three.", False),
        ("\u00ff\u00fe and so on and on", True),
    ],
)
def test_questions_are_filtered(target, text, good):
    tokens = [*target.tokenizer(text).input_ids, *target.stop_ids]
    assert (question(target, tokens, target.stop_ids) is not None) == good
    assert question(target, tokens[:-1], target.stop_ids) is None, "it did not end"
    start = target.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert question(target, [start, *tokens], target.stop_ids) is None


def test_broken_characters_are_no_question(target):
    half = target.tokenizer("é").input_ids[:1]
    tokens = [*target.tokenizer("a quite normal text").input_ids, *half, *target.stop_ids]
    assert question(target, tokens, target.stop_ids) is None


def test_repeats():
    assert repeats([1, 2, 1, 2, 1, 2], 2, 3)
    assert not repeats([1, 2, 1, 2, 3], 2, 3)
    assert not repeats([], 2, 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1"),
        ("[1]", "line 1"),
        ('{"turns": []}', "line 1"),
        ('{"turns": [" "]}', "empty"),
        ('{"category": "a b", "prompt": "hello"}', "one word"),
        ('{"text": "hello"}', "expected"),
    ],
)
def test_bad_prompts_get_a_sentence(tmp_path, line, words):
    (tmp_path / "p.jsonl").write_text(line + "\n")
    with pytest.raises(WhiFlashError, match=words):
        read_prompts([tmp_path / "p.jsonl"])


def test_bad_input_gets_a_sentence_and_nothing_is_lost(target, tmp_path, monkeypatch):
    prompts, out = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out.jsonl"
    recipe = DataRecipe(max_tokens=4)
    with pytest.raises(WhiFlashError, match="nothing to answer"):
        make_data(target, out, recipe)
    with pytest.raises(WhiFlashError, match="cannot be read"):
        make_data(target, out, recipe, [tmp_path / "none.jsonl"])
    with pytest.raises(WhiFlashError, match="no prompt fits"):
        make_data(target, out, DataRecipe(max_tokens=4, max_prompt=3), [prompts])
    out.unlink(missing_ok=True)
    mine = tmp_path / "mine.jsonl"
    mine.write_text("mine\n")
    with pytest.raises(WhiFlashError, match="not written by this command"):
        make_data(target, mine, recipe, [prompts])
    assert mine.read_text() == "mine\n"
    make_data(target, out, recipe, [prompts])
    before = out.read_bytes()
    with pytest.raises(WhiFlashError, match="max_tokens = 4"):
        make_data(target, out, DataRecipe(max_tokens=5), [prompts])
    out.write_bytes(b"damaged\n" + before)
    with pytest.raises(WhiFlashError, match="line 1 is damaged"):
        make_data(target, out, recipe, [prompts])
    out.write_bytes(before)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    entry = journal.Journal(out, journal.read_json(tmp_path / "out.settings.json"))
    with monkeypatch.context() as patch, pytest.raises(WhiFlashError, match="No space left"):
        patch.setattr(Path, "open", full)
        entry.append({"a": 1})
    assert out.read_bytes() == before


def test_a_target_that_cannot_ask_says_so(target, tmp_path, monkeypatch):
    monkeypatch.setattr("whiflash.training.synthesize.question", lambda *_: None)
    monkeypatch.setattr("whiflash.training.synthesize.PATIENCE", 2)
    with pytest.raises(WhiFlashError, match="only 0 usable questions of 2"):
        make_data(target, tmp_path / "out.jsonl", DataRecipe(synthesise=2, slots=2))


@pytest.mark.parametrize(
    "setting", [{"count": 0}, {"slots": 0}, {"max_tokens": 1}, {"temperature": -1.0}, {"temperature": float("nan")}]
)
def test_recipes_are_checked(setting):
    with pytest.raises(WhiFlashError):
        DataRecipe(**setting)


def test_two_runs_on_one_output_are_refused(tmp_path):
    lock = tmp_path / "lock"
    with journal.exclusive(lock), pytest.raises(WhiFlashError, match="another run"), journal.exclusive(lock):
        pass
    with journal.exclusive(lock):
        pass


def test_prompts_of_one_category_keep_it(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello there"}\n\n')
    assert read_prompts([tmp_path / "p.jsonl"]) == [Prompt("chat", "hello there")]


@pytest.mark.slow
def test_the_embedded_target_still_gives_the_answers_handed_out(smollm, shared):
    """Answers that another program generated from the same weights; only a near-tie may part from them."""
    lines = (shared / "data" / "responses-smollm2-135m.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines[::150][:10]]
    jobs = [Job(smollm.encode(row["prompt"]), 256) for row in rows]
    for job, row, tokens in zip(jobs, rows, generate(smollm, jobs, slots=10), strict=True):
        if tokens == row["response_ids"]:
            continue
        at = next(i for i, pair in enumerate(zip(tokens, row["response_ids"], strict=False)) if len(set(pair)) > 1)
        with torch.inference_mode():
            hidden, _ = smollm.network(torch.tensor([[*job.tokens, *tokens[:at]]]))
            first, second = smollm.network.head(hidden[0, -1]).topk(2).values.tolist()
        print(f"{row['prompt'][:40]!r} parts at {at}, where the two likeliest tokens are {first - second:.2e} apart")
        assert first - second < 1e-3


def test_slots_on_a_gpu_leave_nothing_on_the_cpu():
    with fake_cuda():
        config = TargetConfig.from_config(AutoConfig.for_model("llama", **KEYS).to_dict())
        network = on_cuda(lambda: Decoder(config))
        cache = SlotCache(network.new_cache(8), 3)
        cache.load(1, network.new_cache(8))
        cache.lengths = [2, 0, 5]
        cache.commit()
        hidden, _ = network(torch.zeros(3, 1, dtype=torch.long, device=CUDA), cache, cache.index[:, None])
        logits = network.head(hidden[:, -1])
        assert logits.device == cache.mask(1).device == CUDA
