"""The command line, run as a user runs it on a tiny model: what it prints, what it refuses, how it is stopped."""

import io
import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import whiflash
from whiflash import __version__, cli
from whiflash.decoding.session import Session
from whiflash.errors import WhiFlashError
from whiflash.model import WhiFlash
from whiflash.routers.mlp import RouterMLP
from whiflash.routers.neural import FORMAT
from whiflash.target import embedded
from whiflash.target.load import load_target
from whiflash.terminal import STYLES, TARGET, Painter

PROMPT = "Name a letter."


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `whiflash …` in this process."""

    def call(*arguments, stdin: str | bytes = "") -> Result:
        raw = io.BytesIO(stdin if isinstance(stdin, bytes) else stdin.encode())
        monkeypatch.setattr(sys, "argv", ["whiflash", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, "utf-8"))
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Result(end.value.code or 0, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def models(saved) -> list:
    return ["--target", saved["target"], "--dflash", saved["dflash"], "--eagle3", saved["eagle3"]]


@pytest.fixture(scope="module")
def plain(saved):
    """What the target alone answers."""
    return WhiFlash.from_pretrained(saved["target"], drafters="none").generate(PROMPT, max_new_tokens=60)


@pytest.mark.parametrize("drafters", ["none", "df", "ddt", "e3", "df-e3", "ddt-e3", "df-ddt"])
def test_generate_streams_the_targets_answer_and_sums_up(run, models, plain, drafters):
    result = run("generate", PROMPT, *models, "--drafters", drafters, "-n", 60)
    assert result.code == 0
    assert result.out == plain.text + "\n"
    summary = result.err.strip().splitlines()[-1]
    assert summary.startswith(f"{len(plain.tokens)} tokens · ")
    if drafters != "none":
        assert re.search(
            r"tok/s · AL \d\.\d\d · rounds (df|ddt|e3) \d+.* · \d+ switches · catch-up \d+\.\d %$", summary
        )


def test_generate_reads_standard_input(run, models, plain):
    assert run("generate", "-", *models, "-n", 60, stdin=PROMPT).out == plain.text + "\n"


def test_json_and_trace_tell_all_of_it(run, models, plain, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("an older trace")
    result = run("generate", PROMPT, *models, "-n", 60, "--json", "--trace", trace, "--threshold", 1)
    told, rows = json.loads(result.out), [json.loads(line) for line in trace.read_text().splitlines()]
    assert (told["text"], told["tokens"], told["finish_reason"]) == (plain.text, plain.tokens, plain.finish_reason)
    assert told["rounds"] == rows
    assert [r["round"] for r in rows] == list(range(len(rows)))
    assert [t for r in rows for t in r["tokens"]] == plain.tokens[1:]
    assert all(len(r["tokens"]) == r["acceptance_length"] and r["latency"] > 0 for r in rows)
    assert all((r["slot"] == "e3") == (r["entropy"] > 1) for r in rows)
    assert told["stats"]["tokens"] == len(plain.tokens)
    assert sum(told["stats"]["rounds"].values()) == len(rows)
    assert told["mode"].startswith("df (≤ 3 drafted), e3 (≤ 5 drafted), entropy router at 1")
    assert [p.name for p in tmp_path.iterdir()] == ["trace.jsonl"]


def test_json_of_plain_decoding_has_no_numbers_that_are_none(run, models):
    told = json.loads(run("generate", PROMPT, *models, "-n", 1, "--drafters", "none", "--json").out)
    assert (told["stats"]["acceptance_length"], told["rounds"]) == (None, [])
    told = json.loads(run("generate", PROMPT, *models, "-n", 3, "--drafters", "none", "--json").out)
    assert told["rounds"][0]["entropy"] is None
    assert told["mode"].startswith("no drafter")


def test_a_trace_to_a_device_is_written_not_replaced(run, models):
    result = run("generate", PROMPT, *models, "-n", 4, "--trace", "/dev/null")
    assert result.code == 0
    assert Path("/dev/null").is_char_device()


def uncoloured(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_colour_adds_nothing_but_colour(run, models, plain):
    result = run("generate", PROMPT, *models, "-n", 60, "--color")
    legend = "drafted by df e3 · target's own"
    assert uncoloured(result.out) == f"{plain.text}\n{legend}\n"
    assert "\x1b[" in result.out
    assert "\x1b[" not in run("generate", PROMPT, *models, "-n", 60).out


def test_each_token_is_painted_by_who_drafted_it(toy):
    stream, painted, seen = toy.model("ddt-e3/entropy").stream(toy.text[:5], max_new_tokens=80), [], set()
    painter = Painter(toy.target)
    for piece in stream:
        spans = list(painter.spans(piece))
        painted += spans
        origins = [origin for _, origin in spans]
        slot, drafted = (piece.round.slot, piece.round.accepted) if piece.round else (TARGET, 0)
        assert origins == [slot] * drafted + [TARGET] * (len(piece.tokens) - drafted)
        seen |= set(origins)
    assert "".join(text for text, _ in [*painted, painter.rest()]) == stream.output().text
    assert seen == {"ddt", "e3", TARGET} < set(STYLES)


def test_stop_strings_and_ids(run, models, plain):
    stop = plain.text[7:9]
    for color in ([], ["--color"]):
        result = run("generate", PROMPT, *models, "-n", 60, "--stop", stop, *color)
        text = uncoloured(result.out).split("\ndrafted by")[0].removesuffix("\n")
        assert text == plain.text[: plain.text.index(stop)]
    told = json.loads(run("generate", PROMPT, *models, "--json", "--stop-token-id", plain.tokens[5]).out)
    assert told["tokens"] == plain.tokens[: plain.tokens.index(plain.tokens[5]) + 1]


def test_a_seed_repeats_an_answer(run, models):
    answers = [run("generate", PROMPT, *models, "-n", 30, "--temperature", 1, "--seed", s).out for s in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]


BAD = {
    "empty prompt": (["", "MODELS"], "the prompt is empty"),
    "blank prompt": (["  \n", "MODELS"], "the prompt is empty"),
    "temperature -1": ([PROMPT, "MODELS", "--temperature", -1], "temperature must be a number of at least 0"),
    "temperature nan": ([PROMPT, "MODELS", "--temperature", "nan"], "temperature must be a number of at least 0"),
    "temperature inf": ([PROMPT, "MODELS", "--temperature", "inf"], "temperature must be a number of at least 0"),
    "threshold -1": ([PROMPT, "MODELS", "--threshold", -1], "threshold must be a finite number of at least 0"),
    "threshold nan": ([PROMPT, "MODELS", "--threshold", "nan"], "threshold must be a finite number of at least 0"),
    "tree budget 0": ([PROMPT, "MODELS", "--tree-budget", 0], "the tree budget must be at least 1, got 0"),
    "tree budget -3": ([PROMPT, "MODELS", "-d", "ddt", "--tree-budget", -3], "the tree budget must be at least 1"),
    "block size 1": ([PROMPT, "MODELS", "--block-size", 1], "the block size must be at least 2"),
    "depth 0": ([PROMPT, "MODELS", "--eagle-depth", 0], "the EAGLE-3 depth must be at least 1"),
    "wide tree": ([PROMPT, "MODELS", "--eagle-top-k", 41], "a top-k of 1 to 40 (the tokens this head can draft)"),
    "budget of no tree": ([PROMPT, "MODELS", "--tree-budget", 8], "--tree-budget has no effect on drafters df-e3"),
    "block of no DFlash": ([PROMPT, "MODELS", "-d", "e3", "--block-size", 3], "it shapes df or ddt drafts"),
    "rows of a tree": ([PROMPT, "MODELS", "-d", "ddt", "--block-rows", 3], "--block-rows has no effect"),
    "likely nodes of nothing": ([PROMPT, "MODELS", "-d", "none", "--draft-p-min", 0.1], "--draft-p-min has no effect"),
    "certain nodes only": ([PROMPT, "MODELS", "--draft-p-min", 1], "must be at least 0 and below 1, got 1.0"),
    "depth of no head": ([PROMPT, "MODELS", "-d", "df", "--eagle-depth", 3], "--eagle-depth has no effect"),
    "width of no head": ([PROMPT, "MODELS", "-d", "df-ddt", "--eagle-top-k", 3], "--eagle-top-k has no effect"),
    "total of no head": ([PROMPT, "MODELS", "-d", "none", "--eagle-total-tokens", 3], "has no effect on drafters none"),
    "no tokens": ([PROMPT, "MODELS", "-n", 0], "max_new_tokens must be at least 1"),
    "beyond the context": ([PROMPT, "MODELS", "-n", 4090], "reads at most 4096; shorten the prompt"),
    "top-p 0": ([PROMPT, "MODELS", "--top-p", 0], "top-p must lie above 0"),
    "top-k -1": ([PROMPT, "MODELS", "--top-k", -1], "top-k must be at least 0"),
    "min-p 2": ([PROMPT, "MODELS", "--min-p", 2], "min-p must lie between 0 and 1"),
    "seed -1": ([PROMPT, "MODELS", "--seed", -1], "a seed must be a whole number from 0"),
    "empty stop": ([PROMPT, "MODELS", "--stop", ""], "a stop string is empty"),
    "stop id": ([PROMPT, "MODELS", "--stop-token-id", 9999], "stop token ids must lie in"),
    "trace to a directory": ([PROMPT, "MODELS", "--trace", "TMP"], "it must be a file in a directory that exists"),
    "trace to nowhere": ([PROMPT, "MODELS", "--trace", "TMP/no/t"], "it must be a file in a directory that exists"),
    "trace under a file": ([PROMPT, "MODELS", "--trace", "TMP/file/t"], "it must be a file in a directory that exists"),
    "unknown target": (
        [PROMPT, "--target", "nonesuch"],
        "target 'nonesuch' is neither a path that exists nor a hub id",
    ),
    "target without config": ([PROMPT, "--target", "TMP"], "has no config.json"),
    "target is a file": ([PROMPT, "--target", "TMP/file"], "is a file; expected a model directory"),
    "drafters swapped": ([PROMPT, "SWAPPED"], "is a checkpoint of kind eagle3, expected dflash"),
    "unknown drafter": ([PROMPT, "MODELS", "--dflash", "TMP/none"], "drafter"),
    "unknown drafters": ([PROMPT, "MODELS", "-d", "df-xy"], "drafters 'df-xy' are not known"),
    "unknown router": ([PROMPT, "MODELS", "--router", "best"], "router 'best' is neither a path"),
    "router of another width": (
        [PROMPT, "MODELS", "--router", "ROUTER"],
        "not a two-layer router for a target of width",
    ),
    "unknown dtype": ([PROMPT, "MODELS", "--dtype", "float12"], "dtype 'float12' is not known"),
    "unknown device": ([PROMPT, "MODELS", "--device", "abacus"], "device 'abacus'"),
    "absent device": ([PROMPT, "MODELS", "--device", "cuda:77"], "device 'cuda:77'"),
    "unknown tap ids": ([PROMPT, "MODELS", "--tap-ids", "odd"], "tap ids are output"),
    "slot 2": ([PROMPT, "MODELS", "--router", "fixed", "--slot", 2], "slot 2 does not exist"),
    "no checkpoint": ([PROMPT, "TARGET"], "no dflash checkpoint ships for"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(run, models, saved, tmp_path, case):
    arguments, sentence = BAD[case]
    (tmp_path / "file").write_text("{}")
    save_file({"a": torch.zeros(4, 7), "b": torch.zeros(1, 4)}, tmp_path / "router.safetensors")
    swapped = ["--target", saved["target"], "--dflash", saved["eagle3"], "--eagle3", saved["dflash"]]
    words = {"MODELS": models, "SWAPPED": swapped, "TARGET": models[:2], "ROUTER": [tmp_path / "router.safetensors"]}
    given = [w for a in arguments for w in words.get(a, [str(a).replace("TMP", str(tmp_path))])]
    result = run("generate", *given)
    assert (result.code, result.out) == (2, "")
    told = [line for line in result.err.splitlines() if not line.startswith("preparing")]
    assert len(told) == 1 and told[0].startswith("error: ")
    assert sentence in told[0]


def test_standard_input_that_is_no_text(run, models):
    result = run("generate", "-", *models, stdin=b"\xff\xfe\xfa")
    assert (result.code, result.err) == (2, "error: standard input is not utf-8 text (invalid start byte)\n")
    assert "the prompt is empty" in run("generate", "-", *models).err
    result = run("chat", *models, stdin=b"\xff\xfe\n")
    assert result.code == 2 and result.err.startswith("error: standard input is not text")


@pytest.mark.parametrize("arguments", ["--help", "--version", "generate --help", "bench --help", "train data --help"])
def test_help_waits_for_no_model_library(arguments):
    """In a fresh interpreter: what prints help needs neither torch nor transformers, which take seconds to import."""
    script = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from whiflash.cli import main; main()"
    told = subprocess.run([sys.executable, "-c", script, *arguments.split()], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    shown, modules = told.stdout.rstrip("\n").rsplit("\n", 1)
    assert not {"torch", "transformers", "numpy", "safetensors", "huggingface_hub"} & set(modules.split())
    assert "whiflash.cli" in modules and (__version__ if arguments == "--version" else "Usage: ") in shown


def test_the_package_gives_its_names_on_first_use():
    assert set(whiflash.__all__) <= set(dir(whiflash))
    assert whiflash.WhiFlash is WhiFlash and whiflash.WhiFlashError is WhiFlashError
    with pytest.raises(AttributeError, match="no attribute 'WiFlash'"):
        _ = whiflash.WiFlash


def test_usage_errors_end_in_2_as_well(run, models):
    for arguments in (["generate", PROMPT, "--temperature", "warm"], ["generate"], ["generate", PROMPT, "--colour"]):
        assert run(*arguments).code == 2


@pytest.fixture
def prefills(monkeypatch) -> list[tuple[int, list[int]]]:
    """(first row computed, the tokens) of every prompt pass."""
    seen, rewind = [], Session._rewind

    def noted(session, tokens):
        start = rewind(session, tokens)
        seen.append((start, tokens))
        return start

    monkeypatch.setattr(Session, "_rewind", noted)
    return seen


def test_chat_keeps_its_caches_between_turns(run, models, prefills):
    result = run("chat", *models, "-n", 20, stdin="Hello there\n\nAnd now?\n/reset\nHello there\n/exit\nnever read\n")
    assert result.code == 0
    assert result.out.count("tok/s") == len(prefills) == 3
    (_, first), (kept, second), (fresh, third) = prefills
    assert second[: len(first)] == first
    assert kept >= len(first) + 5  # neither the prompt nor what is sure of its answer was computed again
    assert (fresh, third) == (0, first)


def test_chat_answers_as_generate_does(run, models):
    chat = run("chat", *models, "-n", 20, "--system", "Be brief.", stdin=PROMPT + "\n")
    assert re.search(r"^\d+ tokens · .* switches · catch-up \d+\.\d %$", chat.out, re.MULTILINE)
    wanted = run("generate", PROMPT, *models, "-n", 20, "--system", "Be brief.").out.rstrip("\n")
    assert wanted in chat.out
    painted = run("chat", *models, "-n", 20, "--system", "Be brief.", "--color", stdin=PROMPT + "\n")
    assert wanted in uncoloured(painted.out)


def test_chat_outlives_a_full_context_and_an_interrupt(run, models, monkeypatch):
    result = run("chat", *models, "-n", 4000, stdin=f"{'x' * 200}\n/reset\n")
    assert re.search("error: the prompt has .* ask for fewer$", result.out, re.MULTILINE) and result.code == 0
    rounds, original = [], Session.round

    def interrupted(session, take=None):
        rounds.append(session)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return original(session, take)

    monkeypatch.setattr(Session, "round", interrupted)
    result = run("chat", *models, "-n", 30, stdin="Hello\nAnd then, what?\n")
    assert (result.code, result.out.count("tok/s")) == (0, 2)
    assert len(rounds) > 6 and len(set(map(id, rounds))) == 1


def test_demo_compares_all_methods(run, saved, monkeypatch):
    target = load_target(saved["target"])
    target.name = embedded.NAME
    monkeypatch.setattr("whiflash.demo.load_target", lambda progress: target)
    for module in ("model", "demo"):
        monkeypatch.setattr(f"whiflash.{module}.ASSETS", saved["dflash"].parent)
    result = run("demo", "--max-new-tokens", 24)
    assert result.code == 0
    assert all(category in result.out for category in ("chat: ", "math: ", "coding: ", "agentic: "))
    rows = [line for line in result.out.splitlines() if "same output ✓" in line]
    assert [re.split(r"\W+", row)[1] for row in rows] == ["plain", "DFlash", "EAGLE", "WhiFlash"]
    assert run("demo", "--max-new-tokens", 1).code == 2
    monkeypatch.setattr("whiflash.demo._same", lambda outputs, name: name != "DFlash")
    different = run("demo", "--max-new-tokens", 4)
    assert (different.code, different.out.count("DIFFERENT ✗")) == (1, 1)


def test_info_tells_kinds_apart(run, saved, tmp_path):
    router = tmp_path / "router"
    router.mkdir()
    save_file(RouterMLP(32, 4).state_dict(), router / "model.safetensors")
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((router / "model.safetensors").read_bytes())
    (router / "config.json").write_text(json.dumps({"format": FORMAT, "pair": "df-e3", "threshold": 0.5}))
    for name, wanted in {
        saved["target"]: ["target (llama, own decoder)", "layers", "parameters"],
        saved["dflash"]: ["DFlash model (z-lab layout)", "[1, 3, 5] (boundary ids)", "block_size", "mask_token_id"],
        saved["eagle3"]: ["EAGLE-3 head (official / SpecForge layout)", "[2, 3, 5] (boundary ids)", "draft_vocab_size"],
        router: ["neural router", "df-e3", "0.5"],
        bare: ["bare tensors", "tensors"],
    }.items():
        result = run("info", name)
        assert result.code == 0
        assert all(word in re.sub(r"\s+", " ", result.out) for word in wanted), result.out
    assert run("info", tmp_path / "nothing").code == 2
    assert run("info", tmp_path).code == 2


def test_an_interrupt_between_rounds_loses_no_token(run, models, saved, monkeypatch):
    """Ctrl-C just after the third round took its tokens, before anything of it was shown."""
    original, rounds = Session.round, []

    def interrupted(session, take=None):
        rounds.append(original(session, take))
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return rounds[-1]

    monkeypatch.setattr(Session, "round", interrupted)
    shown = []
    for flags in ([], ["--color"], ["--json"]):
        rounds.clear()
        result = run("generate", PROMPT, *models, "--ignore-eos", *flags)
        assert result.code == 130
        shown.append(uncoloured(result.out))
    told = json.loads(shown[2])
    assert told["finish_reason"] == "interrupted"
    assert told["tokens"][1:] == [t for r in rounds for t in r.tokens]
    assert shown[0] == told["text"] + "\n"
    assert shown[1].startswith(shown[0] + "drafted by")


def test_an_interrupt_keeps_what_had_come(models, tmp_path):
    """Ctrl-C in mid-stream: the text so far, its trace and its figures, and exit code 130."""
    trace = tmp_path / "trace.jsonl"
    command = [sys.executable, "-c", "from whiflash.cli import main; main()", "generate", PROMPT, *map(str, models)]
    command += ["-n", "4000", "--ignore-eos", "--trace", str(trace)]
    # a test run in the background of a shell ignores interrupts, and so would its children
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed) as process:
        began = process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors.decode()
    assert len(began) == 40 and rest.endswith(b"\n")
    assert b"Traceback" not in errors
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    told = int(errors.decode().strip().splitlines()[-1].split()[0])
    assert 40 <= 1 + sum(len(r["tokens"]) for r in rows) <= told < 4000
