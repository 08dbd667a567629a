"""The Python API, end to end on a tiny chat model from disk."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from whiflash import WhiFlash
from whiflash.errors import WhiFlashError
from whiflash.model import Drafting

MESSAGES = [
    {"role": "system", "content": "Answer in letters."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "abc"},
    {"role": "user", "content": "More, please."},
]
SHAPES = {
    "none": ("none", None),
    "block of 3": ("df", Drafting(block_size=3)),
    "tree": ("ddt", Drafting(tree_budget=12)),
    "chain": ("e3", Drafting(eagle3_depth=2)),
    "dynamic tree": ("e3", Drafting(eagle3_depth=3, eagle3_top_k=4, eagle3_total_tokens=20)),
    "pair": ("ddt-e3", Drafting(tree_budget=5, eagle3_top_k=2)),
}


def load(saved, drafters: str = "df-e3", **options) -> WhiFlash:
    given = {"target": saved["target"], "dflash": saved["dflash"], "eagle3": saved["eagle3"]}
    return WhiFlash.from_pretrained(**given, drafters=drafters, **options)


@pytest.fixture(scope="module")
def model(saved) -> WhiFlash:
    return load(saved)


@pytest.fixture(scope="module")
def judge(saved):
    """transformers: tokens of a conversation, and its greedy answer."""
    tokenizer = AutoTokenizer.from_pretrained(saved["target"])
    reference = AutoModelForCausalLM.from_pretrained(saved["target"], dtype=torch.float32)

    def answer(messages: list, count: int = 50) -> tuple[list[int], list[int]]:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = reference.generate(**ids, max_new_tokens=count, do_sample=False)[0].tolist()
        return out[: ids["input_ids"].shape[1]], out[ids["input_ids"].shape[1] :]

    return answer


@pytest.mark.parametrize("shape", SHAPES)
def test_messages_are_answered_as_transformers_does(saved, judge, shape):
    drafters, drafting = SHAPES[shape]
    output = load(saved, drafters, drafting=drafting).generate(MESSAGES, max_new_tokens=50)
    assert (output.prompt_tokens, output.tokens) == judge(MESSAGES)
    assert output.text == tiny.tokenizer().decode(output.tokens, skip_special_tokens=True)
    assert output.stats.prompt_tokens == len(output.prompt_tokens)
    assert {r.slot for r in output.rounds} <= ({None} if drafters == "none" else set(drafters.split("-")))


def test_a_text_is_one_user_turn_and_a_system_text_goes_in_front(model, judge):
    user = {"role": "user", "content": "Hi"}
    for messages, given in (
        ([user], {}),
        ([{"role": "system", "content": "Be brief."}, user], {"system": "Be brief."}),
    ):
        wanted = judge(messages)
        output = model.generate("Hi", max_new_tokens=50, **given)
        assert (output.prompt_tokens, output.tokens) == wanted
        assert model.generate([user], max_new_tokens=50, **given).tokens == wanted[1]
        for ids in (wanted[0], torch.tensor(wanted[0]), tuple(wanted[0]), torch.tensor(wanted[0]).numpy()):
            assert model.generate(ids, max_new_tokens=50).tokens == wanted[1]


def test_template_options_reach_the_template(model, monkeypatch):
    thinking = "{% if enable_thinking is defined and not enable_thinking %}/no{% endif %}"
    template = "{{ messages[0]['content'] }}" + thinking + "{{ tone }}"
    monkeypatch.setattr(model.target.tokenizer, "chat_template", template)
    decode = model.target.tokenizer.decode
    assert decode(model.stream("Hi", enable_thinking=False)._prompt) == "Hi/no"
    assert decode(model.stream("Hi", enable_thinking=True, tone="!")._prompt) == "Hi!"
    assert decode(model.stream("Hi")._prompt) == "Hi"


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.2}, {"max_tokens": 5}, {"enable_thinking": True}])
def test_options_that_nothing_reads_are_refused(model, monkeypatch, options):
    """Sampling options of other engines, misspelt ones, and template options of other models."""
    (name,) = options
    monkeypatch.setattr(model.target.tokenizer, "chat_template", "{{ messages[0]['content'] }}{{ max_tokens_of_it }}")
    for prompt in ("Hi", [{"role": "user", "content": "Hi"}], [1, 2, 3]):
        with pytest.raises(WhiFlashError, match=f"the option {name} would have no effect"):
            model.stream(prompt, **options)
        model.stream(prompt, **{name: False})
    monkeypatch.setattr(model.target.tokenizer, "chat_template", None)
    with pytest.raises(WhiFlashError, match=f"the option {name} would have no effect"):
        model.stream("Hi", **options)


def test_a_model_without_a_chat_template_continues_text(model, monkeypatch):
    monkeypatch.setattr(model.target.tokenizer, "chat_template", None)
    assert model.target.tokenizer.decode(model.stream("Once")._prompt) == "Once"
    for prompt, system in ((MESSAGES, None), ("Once", "Be brief.")):
        with pytest.raises(WhiFlashError, match="no chat template"):
            model.stream(prompt, system=system)


def test_a_stream_gives_the_answer_in_pieces(model):
    whole, stream = model.generate("Hi", max_new_tokens=40), model.stream("Hi", max_new_tokens=40)
    first = next(stream)
    assert first.round is None and len(first.tokens) == 1
    assert stream.output().finish_reason == "unfinished"
    pieces = [first, *stream]
    assert "".join(p.text for p in pieces) == whole.text == stream.output().text
    assert [p.round.slot for p in pieces[1:]] == [r.slot for r in whole.rounds]
    assert list(stream) == []


def test_an_interrupted_stream_is_what_came_until_then(model):
    stream = model.stream("Hi", max_new_tokens=40, ignore_eos=True)
    text = "".join(next(stream).text for _ in range(3))
    rest = stream.interrupt()
    output = stream.output()
    assert (output.finish_reason, output.text) == ("interrupted", text + rest.text)
    assert output.tokens == model.generate("Hi", max_new_tokens=40, ignore_eos=True).tokens[: len(output.tokens)]
    assert list(stream) == []


def test_a_session_carries_a_conversation(model):
    session, messages = model.session(), [{"role": "user", "content": "Hi"}]
    for turn in ("And?", "Go on", None):
        output = model.generate(messages, max_new_tokens=30, session=session)
        fresh = model.generate(messages, max_new_tokens=30)
        assert (output.tokens, [r.slot for r in output.rounds]) == (fresh.tokens, [r.slot for r in fresh.rounds])
        messages += [{"role": "assistant", "content": output.text}, {"role": "user", "content": turn}]


def test_sampling_needs_no_seed_and_obeys_one(model):
    options = {"max_new_tokens": 30, "temperature": 1.5, "ignore_eos": True}
    answers = [model.generate("Hi", **options, seed=seed).tokens for seed in (3, None, 3, None, 4)]
    assert answers[0] == answers[2]
    assert len({tuple(a) for a in answers}) == 4


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        (["Hi", "there"], {}, "a prompt is one text, token ids, or messages"),
        ({"role": "user", "content": "Hi"}, {}, "a prompt is one text, token ids, or messages"),
        ([[1, 2]], {}, "a prompt is one text, token ids, or messages"),
        ([{"content": "Hi"}], {}, "a prompt is one text, token ids, or messages"),
        ([1, 2, 9999], {}, "prompt token ids must lie in"),
        ([1, -1], {}, "prompt token ids must lie in"),
        ([1, 2], {"system": "Be brief."}, "cannot go in front of token ids"),
        ("a\udcff", {}, "not valid Unicode"),
        ("Hi", {"max_new_tokens": 4096}, "shorten the prompt or ask for fewer"),
        ("Hi", {"top_p": 0.0}, "top-p must lie above 0"),
    ],
)
def test_prompts_that_cannot_be(model, prompt, options, sentence):
    with pytest.raises(WhiFlashError, match=sentence):
        model.generate(prompt, **options)


def test_a_template_that_refuses_is_quoted(model, monkeypatch):
    monkeypatch.setattr(model.target.tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(WhiFlashError, match="refuses these messages: no system role"):
        model.generate(MESSAGES)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"tree_budget": 0}, "tree budget must be at least 1"),
        ({"tree_budget": 5000}, "tree budget must be at most 4096"),
        ({"eagle3_total_tokens": 5000}, "EAGLE-3 total of tokens must be at most 4096"),
        ({"block_size": 1}, "block size must be at least 2"),
        ({"block_size": 0}, "block size must be at least 2"),
        ({"eagle3_depth": 0}, "EAGLE-3 depth must be at least 1"),
        ({"eagle3_depth": 10**22}, "EAGLE-3 depth must be at most 4096"),
        ({"block_size": 5000}, "block size must be at most 4096"),
        ({"block_rows": 5000}, "block rows must be at most 4096"),
        ({"eagle3_top_k": 5000}, "EAGLE-3 top-k must be at most 4096"),
        ({"eagle3_top_k": 0}, "EAGLE-3 top-k must be at least 1"),
        ({"eagle3_total_tokens": 1}, "EAGLE-3 total of tokens must be at least 2"),
    ],
)
def test_shapes_of_drafts_are_checked_before_anything_is_loaded(shape, sentence):
    with pytest.raises(WhiFlashError, match=sentence):
        Drafting(**shape)
