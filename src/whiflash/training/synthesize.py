"""The texts a drafter learns from: the target's own answers to prompts, some of which the target may write itself.

Everything is drawn from the seed and the text at hand, not from the order of events, so a run that was killed goes on
to the same file that an undisturbed one leaves. Conversations contribute their first turn: later ones would need
answers that the target never gave.
"""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from whiflash.errors import WhiFlashError
from whiflash.journal import Journal, exclusive
from whiflash.target.target import Target
from whiflash.training.slots import Job, generate

# What the target is told to be when it writes a user's turn, by category of the prompt that this makes likely.
SYSTEMS = {
    "chat": (
        "You are a helpful assistant who answers everyday questions about life, work, science and culture.",
        "You are a writing assistant. Users ask you to write, summarise, rewrite and explain texts.",
    ),
    "math": (
        "You are a mathematics tutor who solves the user's word problems step by step.",
        "You are an assistant who solves algebra, geometry, counting and probability exercises.",
    ),
    "coding": (
        "You are a Python programmer. Users ask you to write functions, with a signature and examples.",
        "You are a coding assistant who explains, fixes and extends programs that users show you.",
    ),
    "agentic": (
        "You are an agent with tools: search, a calculator, a file system and a shell. Users give you tasks to do.",
        "You are a customer service agent who looks up orders, changes bookings and follows the company's policy.",
    ),
}
TEMPERATURES = (0.8, 0.9, 1.0)
# Attempts in a row that share a system text, whose K/V are then computed once.
RUN = 8
# Most attempts for one accepted question, before self-synthesis gives up on a target that cannot do it.
PATIENCE = 40
# Part of a time budget that questions may take: one costs about a third of its answer.
QUESTIONS = 0.3
# Prompts are answered in windows, longest first within each: neighbours of one length leave little padding.
WINDOW = 256
CATEGORY = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Prompt:
    category: str
    text: str


@dataclass(frozen=True)
class DataRecipe:
    """How many answers, and how they are made.

    `count` caps the answers (None: one for every prompt). `synthesise` questions are written by the target itself.
    `max_tokens` bounds an answer, `max_prompt` the prompt with its template; longer prompts are left out.
    `temperature` 0 answers greedily. `slots` answers are generated at a time.
    """

    count: int | None = None
    synthesise: int = 0
    max_tokens: int = 256
    max_prompt: int = 1024
    temperature: float = 0.0
    slots: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise WhiFlashError(f"count must be at least 1 answer, got {self.count}")
        if self.synthesise < 0 or self.slots < 1 or self.max_tokens < 2 or self.max_prompt < 1:
            raise WhiFlashError("synthesise must be 0 or more, slots and max_prompt at least 1, max_tokens at least 2")
        if not (0 <= self.temperature <= 10 and math.isfinite(self.temperature)):
            raise WhiFlashError(f"temperature must lie in 0..10 (0: greedy), got {self.temperature}")


@dataclass(frozen=True)
class Status:
    """Where a stage stands: rows done of `total`, and the tokens this process generated in `seconds`."""

    stage: str
    done: int
    total: int
    new: int
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def eta(self) -> float | None:
        """Seconds to go at the pace so far; None before the first row."""
        return (self.total - self.done) * self.seconds / self.new if self.new else None


Report = Callable[[Status], None]
T = TypeVar("T")


def read_prompts(files: Sequence[str | Path]) -> list[Prompt]:
    """First turns of JSONL rows `{"category": …, "turns": [text, …]}`, or `{"prompt": text}`; each text once."""
    prompts: dict[str, Prompt] = {}
    for file in files:
        try:
            lines = Path(file).read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise WhiFlashError(f"the prompts {file} cannot be read ({error}); expected a JSONL file") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = row["turns"][0] if "turns" in row else row["prompt"]
                category = row.get("category", "chat")
                if not (isinstance(text, str) and text.strip() and CATEGORY.fullmatch(category)):
                    raise ValueError("the text is empty or the category is not one word")
            except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                raise WhiFlashError(
                    f'{file}, line {number}: expected {{"category": "chat", "turns": ["the prompt"]}} ({error})'
                ) from error
            prompts.setdefault(normalised(text), Prompt(category, text))
    return list(prompts.values())


def normalised(text: str) -> str:
    """What two prompts have in common when they ask the same: letters and digits, in lower case."""
    return " ".join(re.findall(r"\w+", text.lower()))


def make_data(
    target: Target,
    out: str | Path,
    recipe: DataRecipe,
    prompts: Sequence[str | Path] = (),
    exclude: Sequence[str | Path] = (),
    report: Report = lambda status: None,
    seconds: float | None = None,
) -> int:
    """Answer prompts into `out`, rows `{"category", "prompt", "response_ids"}`; returns the rows it holds.

    prompts: JSONL files. exclude: files of prompts that must not be used (those an evaluation will ask). Called again
    it goes on where it stopped, be it killed or out of `seconds`. Out of time for questions, it answers those it has.
    """
    out = Path(out)
    taken = {normalised(p.text) for p in read_prompts(exclude)}
    given = [p for p in read_prompts(prompts) if normalised(p.text) not in taken]
    if not given and not recipe.synthesise:
        raise WhiFlashError("there is nothing to answer; give --prompts FILE, or --synthesise N to let the target ask")
    began = time.monotonic()
    with exclusive(out.with_name(f".{out.name}.lock")):
        written: list[Prompt] = []
        if recipe.synthesise:
            taken.update(normalised(p.text) for p in given)
            file = out.with_name(f"{out.stem}.questions.jsonl")
            share = None if seconds is None else seconds * QUESTIONS
            written = synthesise(target, file, recipe, taken, report, share)
        if not given and not written:
            return 0
        left = None if seconds is None else seconds - (time.monotonic() - began)
        return answer(target, out, recipe, [*given, *written], report, left)


def synthesise(
    target: Target,
    out: Path,
    recipe: DataRecipe,
    taken: set[str] | frozenset[str] = frozenset(),
    report: Report = lambda status: None,
    seconds: float | None = None,
) -> list[Prompt]:
    """Let the target write `recipe.synthesise` questions into `out` (rows in the prompts' format), none in `taken`."""
    wanted = recipe.synthesise
    settings = {"kind": "questions", "target": target.fingerprint(), "seed": recipe.seed, "version": 1}
    journal = Journal(out, settings)
    seen = {*taken, *(normalised(row["turns"][0]) for row in journal.rows)}
    attempt = 1 + max((row["attempt"] for row in journal.rows), default=-1)
    turns = [(category, *user_turn(target, system)) for category, all_ in SYSTEMS.items() for system in all_]
    stops = frozenset(target.stop_ids).union(*(ends for _, _, ends in turns))
    watch = _Watch("writing questions", len(journal.rows), wanted, report, seconds)

    def jobs() -> Iterator[Job]:
        for number in watch.while_time(range(attempt, attempt + PATIENCE * wanted)):
            _, tokens, _ = turns[number // RUN % len(turns)]
            yield Job(
                tokens, 192, TEMPERATURES[number % len(TEMPERATURES)], _seed(recipe.seed, "question", str(number))
            )

    if len(journal.rows) < wanted:
        for number, tokens in enumerate(generate(target, jobs(), slots=recipe.slots, stops=stops), attempt):
            text = question(target, tokens, stops)
            if text is not None and normalised(text) not in seen:
                seen.add(normalised(text))
                category = turns[number // RUN % len(turns)][0]
                journal.append({"id": f"own/{number}", "category": category, "turns": [text], "attempt": number})
            watch.tell(len(journal.rows), len(tokens))
            if len(journal.rows) >= wanted:
                break
        if len(journal.rows) < wanted and not watch.expired:
            raise WhiFlashError(
                f"{target.name} wrote only {len(journal.rows)} usable questions of {wanted}; "
                "ask for fewer with --synthesise, or give it --prompts"
            )
    return [Prompt(row["category"], row["turns"][0]) for row in journal.rows[:wanted]]


def user_turn(target: Target, system: str) -> tuple[list[int], frozenset[int]]:
    """The chat template up to where the user's text begins, and the special tokens that end it."""
    mark = "\u241f"
    tokenizer = target.tokenizer
    if tokenizer.chat_template is None:
        raise WhiFlashError(f"{target.name} has no chat template, so it cannot play the user; give it --prompts")
    user = {"role": "user", "content": mark}
    try:
        text = tokenizer.apply_chat_template([{"role": "system", "content": system}, user], tokenize=False)
    except Exception:  # a template without system role says so with an error of its own
        text = tokenizer.apply_chat_template([user], tokenize=False)
    before, _, after = text.partition(mark)
    ends = tokenizer(after, add_special_tokens=False).input_ids[:1]
    return tokenizer(before, add_special_tokens=False).input_ids, frozenset(ends) & special_ids(target)


def special_ids(target: Target) -> frozenset[int]:
    """Every special token, named ones (end of sequence, padding, …) and others."""
    tokenizer = target.tokenizer
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(tokenizer.all_special_ids) | added


def question(target: Target, tokens: Sequence[int], stops: frozenset[int]) -> str | None:
    """The text of a finished, sensible user's turn, or None: it must have ended, be short, and not repeat itself."""
    body = tokens[:-1]
    if tokens[-1] not in stops or not 6 <= len(body) <= 160 or special_ids(target).intersection(body):
        return None
    text = target.decode(body).strip()
    words = normalised(text).split()
    if len(text) < 16 or "\ufffd" in text or repeats(body, 4, 3) or repeats(words, 3, 3):
        return None
    return text


def repeats(items: Sequence[int | str], size: int, times: int) -> bool:
    """Whether any run of `size` items occurs `times` times."""
    runs = Counter(tuple(items[i : i + size]) for i in range(len(items) - size + 1))
    return bool(runs) and max(runs.values()) >= times


def answer(
    target: Target,
    out: Path,
    recipe: DataRecipe,
    prompts: Sequence[Prompt],
    report: Report = lambda status: None,
    seconds: float | None = None,
) -> int:
    """Answer `prompts` in a shuffled order, as many as `recipe.count`; returns the rows of `out`."""
    settings = {
        "kind": "answers",
        "target": target.fingerprint(),
        "seed": recipe.seed,
        "temperature": recipe.temperature,
        "max_tokens": recipe.max_tokens,
    }
    journal = Journal(out, settings)
    room = min(recipe.max_prompt, target.max_positions - recipe.max_tokens)
    prompts = sorted(prompts, key=lambda p: (_seed(recipe.seed, "order", p.text), p.text))
    encoded = [(p, tokens) for p in prompts if len(tokens := target.encode(p.text)) <= room][: recipe.count]
    if not encoded:
        raise WhiFlashError(f"no prompt fits in {room} tokens (max_prompt, or the target's context less the answer)")
    plan = [
        item
        for begin in range(0, len(encoded), WINDOW)
        for item in sorted(encoded[begin : begin + WINDOW], key=lambda item: -len(item[1]))
    ]
    have = {row["prompt"] for row in journal.rows}
    todo = [item for item in plan if item[0].text not in have]
    watch = _Watch("answering", len(plan) - len(todo), len(plan), report, seconds)
    jobs = (
        Job(tokens, recipe.max_tokens, recipe.temperature, _seed(recipe.seed, "answer", prompt.text))
        for prompt, tokens in watch.while_time(todo)
    )
    prefix = common_prefix([tokens for _, tokens in plan])
    answers = generate(target, jobs, slots=min(recipe.slots, len(plan)), prefix=prefix)
    for (prompt, _), tokens in zip(todo, answers, strict=False):
        journal.append({"category": prompt.category, "prompt": prompt.text, "response_ids": tokens})
        watch.tell(watch.done + 1, len(tokens))
    return len(journal.rows)


def common_prefix(sequences: Sequence[list[int]]) -> list[int]:
    """The ids that all sequences share at their beginning, at least one id short of the shortest."""
    low, high = min(sequences), max(sequences)
    shared = 0
    while shared < min(len(low), len(high)) and low[shared] == high[shared]:
        shared += 1
    return low[: min(shared, min(map(len, sequences)) - 1)]


def _seed(seed: int, kind: str, text: str) -> int:
    return int.from_bytes(sha256(f"{seed}\0{kind}\0{text}".encode()).digest()[:7], "big")


class _Watch:
    """Counts rows and tokens against the clock."""

    def __init__(self, stage: str, done: int, total: int, report: Report, seconds: float | None):
        self.stage, self.done, self.total, self.report, self.limit = stage, done, total, report, seconds
        self.first, self.tokens, self.began = done, 0, time.monotonic()
        self._report()

    def tell(self, done: int, tokens: int) -> None:
        self.done, self.tokens = done, self.tokens + tokens
        self._report()

    def while_time(self, items: Iterable[T]) -> Iterator[T]:
        """The items, one at least, until time is up: what was begun is finished, for as long as one answer takes."""
        for item in items:
            yield item
            if self.expired:
                return

    @property
    def expired(self) -> bool:
        return self.limit is not None and time.monotonic() - self.began >= self.limit

    def _report(self) -> None:
        elapsed = time.monotonic() - self.began
        self.report(Status(self.stage, self.done, self.total, self.done - self.first, self.tokens, elapsed))
