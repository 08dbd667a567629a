"""Draft trees against searches written the slow way: the best prefixes, and the order and masks of nodes."""

import heapq

import pytest
import torch

from toy import PROMPT, VOCAB, decode
from whiflash.drafters.ddtree import DDTreeDrafter, best_prefixes
from whiflash.drafters.dflash import DFlashDrafter
from whiflash.drafters.draft import Draft, chain, tree
from whiflash.drafters.drafter import DraftState
from whiflash.drafters.eagle3 import Eagle3Drafter
from whiflash.errors import WhiFlashError


def prefixes(tokens, parents) -> list[tuple[int, ...]]:
    """The path of every node, for parents that precede their children; -1 is the root."""
    paths = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def by_heap(log_probs: torch.Tensor, budget: int) -> dict[tuple[int, ...], float]:
    """DDTree as published: pop the best prefix; push its next sibling and its first child."""
    ranked, order = log_probs.double().sort(-1, descending=True)
    heap, found = [(-float(ranked[0, 0]), (0,))], {}
    while heap and len(found) < budget:
        score, ranks = heapq.heappop(heap)
        found[tuple(int(order[d, r]) for d, r in enumerate(ranks))] = -score
        *above, last = ranks
        depth = len(ranks)
        if last + 1 < log_probs.shape[1]:
            step = float(ranked[depth - 1, last] - ranked[depth - 1, last + 1])
            heapq.heappush(heap, (score + step, (*above, last + 1)))
        if depth < log_probs.shape[0]:
            heapq.heappush(heap, (score - float(ranked[depth, 0]), (*ranks, 0)))
    return found


@pytest.mark.parametrize("spread", [0.3, 3.0, 10.0])
@pytest.mark.parametrize(("depths", "vocab", "budget"), [(1, 5, 3), (3, 4, 6), (7, 50, 16), (7, 50, 64), (3, 4, 200)])
def test_the_best_prefixes_are_those_of_the_heap(depths, vocab, budget, spread):
    for seed in range(4):
        logits = torch.randn(depths, vocab, generator=torch.Generator().manual_seed(seed)) * spread
        log_probs = logits.log_softmax(-1)
        tokens, parents, _ = best_prefixes(log_probs, budget)
        assert bool((parents < torch.arange(len(parents))).all())
        got = prefixes(tokens, parents)
        scores = [sum(float(log_probs[d, t]) for d, t in enumerate(path)) for path in got]
        assert scores == sorted(scores, reverse=True) or scores == pytest.approx(sorted(scores, reverse=True))
        wanted = by_heap(log_probs, budget)
        assert set(got) == set(wanted)
        assert len(got) == len(set(got))


def test_equal_scores_leave_no_child_without_its_parent():
    certain = torch.full((4, 5), float("-inf"))
    certain[:, 2] = 0
    for log_probs in (certain, torch.zeros(4, 5), torch.full((4, 5), -1.6)):
        for budget in (1, 2, 3, 7, 19):
            _, parents, _ = best_prefixes(log_probs, budget)
            assert bool((parents < torch.arange(len(parents))).all())
            assert bool((parents >= -1).all())


def check(draft: Draft, most: int) -> None:
    """Parents first, depths and ancestors as the parents say, different tokens among siblings."""
    count = len(draft)
    assert count <= most
    parents = draft.parents.tolist()
    assert parents[0] == -1
    above = [{0}]
    for node in range(1, count):
        assert 0 <= parents[node] < node
        above.append(above[parents[node]] | {node})
    assert draft.depths.tolist() == [len(a) - 1 for a in above]
    assert [set(row.nonzero().flatten().tolist()) for row in draft.ancestors] == above
    pairs = list(zip(parents, draft.tokens.tolist(), strict=True))[1:]
    assert len(pairs) == len(set(pairs))
    assert 0 <= int(draft.tokens.min()) <= int(draft.tokens.max()) < VOCAB


@pytest.fixture(scope="module")
def session(toy):
    """A session in the middle of a text, for drafting by hand."""
    session = toy.mode("ddt-e3/entropy", lazy=False)
    decode(session, PROMPT, 30)
    session._catch_up(session.drafters)
    return session


def state(session, model) -> DraftState:
    return session.states[id(model)]


def test_drafters_place_every_row_where_the_design_says(toy, session):
    """With the root at position s: DFlash's slots lie at s..s+B-1; EAGLE-3's row p joins feature p with token p+1.

    Both from scratch, without caches that catching up has filled.
    """
    log, s = session.log, session.log.length
    with torch.inference_mode():
        model, cache = toy.dflash, toy.dflash.new_cache(s + 4)
        model.write_context(log.features(model.taps, 0, s), torch.arange(s), cache)
        cache.advance(s)
        block = torch.tensor([[int(log.tokens[s]), *[model.config.mask_token_id] * 3]])
        wanted = model.logits(model(block, torch.arange(s, s + 4), cache)[0, 1:])
        got = DDTreeDrafter(model, 4).block_logits(state(session, model), log)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        head, last = toy.eagle3, {}
        for shift in (0, 1):
            x, tokens = head.fuse(log.features(head.taps, 0, s)), log.tokens[None, 1 : s + 1]
            y = head(x, tokens, torch.arange(s) * (1 + shift), head.new_cache(s))
            last[shift] = head.logits(y)[0, -1]
        got = after(Eagle3Drafter(head), state(session, head), log, ())
    torch.testing.assert_close(got, last[0], atol=1e-4, rtol=1e-4)
    assert (got - last[1]).abs().max() > 1e-2, "positions make no difference: this test would prove little"


@pytest.mark.parametrize("budget", [1, 3, 7, 16, 40])
def test_ddtree_drafts_a_sound_tree(toy, session, budget):
    drafter = DDTreeDrafter(toy.dflash, budget)
    with torch.inference_mode():
        draft = drafter.draft(state(session, toy.dflash), session.log, None)
        log_probs = drafter.block_logits(state(session, toy.dflash), session.log).log_softmax(-1)
    check(draft, budget + 1)
    assert set(prefixes(draft.tokens[1:], draft.parents[1:] - 1)) == set(by_heap(log_probs, budget))


@pytest.mark.parametrize(("depth", "top_k", "total"), [(1, 3, 4), (2, 2, 5), (3, 3, 9), (4, 4, None), (3, 8, 30)])
def test_the_dynamic_tree_is_the_one_of_a_plain_search(toy, session, depth, top_k, total):
    """Each level expands the best k nodes of the last into their k best children; the best of all are kept.

    The plain search asks the head for every path as a chain of its own.
    """
    drafter, log = Eagle3Drafter(toy.eagle3, depth, top_k, total), session.log
    with torch.inference_mode():
        draft = drafter.draft(state(session, toy.eagle3), log, None)
        check(draft, drafter.total_tokens)
        level, scores = [()], {(): 0.0}
        for _ in range(depth):
            children = {}
            for path in level:
                log_probs = after(drafter, state(session, toy.eagle3), log, path).log_softmax(-1)
                best, choice = log_probs.topk(top_k)
                for score, token in zip(best.tolist(), toy.eagle3.target_ids[choice].tolist(), strict=True):
                    children[(*path, token)] = scores[path] + score
            scores |= children
            level = sorted(children, key=children.get, reverse=True)[:top_k]
    del scores[()]
    wanted = sorted(scores, key=scores.get, reverse=True)[: drafter.total_tokens - 1]
    assert set(prefixes(draft.tokens[1:], draft.parents[1:] - 1)) == set(wanted)


@pytest.mark.parametrize(("depth", "total", "nodes"), [(5, None, 6), (5, 3, 3), (5, 6, 6), (70, None, 71)])
def test_a_chain_ends_with_its_depth_or_its_total(toy, session, depth, total, nodes):
    drafter = Eagle3Drafter(toy.eagle3, depth, total_tokens=total)
    with torch.inference_mode():
        draft = drafter.draft(state(session, toy.eagle3), session.log, None)
        longer = Eagle3Drafter(toy.eagle3, 80).draft(state(session, toy.eagle3), session.log, None)
    assert len(draft) == drafter.rows == nodes
    assert torch.equal(draft.tokens, longer.tokens[:nodes])


@pytest.mark.parametrize("name", ["df", "ddt", "e3", "e3t"])
@torch.inference_mode()
def test_what_is_unlikely_is_left_out_and_nothing_else(toy, session, name):
    """At every root: the whole draft's nodes of at least that confidence, the same ones in the same order."""
    drafter, log, sizes = toy.drafter(name), session.log, set()
    end = log.length
    for log.length in range(len(PROMPT), end):
        at = DraftState(drafter.model.new_cache(end + 16))
        drafter.catch_up(at, log)
        drafter.p_min = 0.0
        whole = drafter.draft(at, log, None)
        assert (whole.confidence[1:] <= 1).all() and len(whole) == len(whole.confidence) + 1
        for node, parent in enumerate(whole.parents.tolist()):
            assert parent < 1 or whole.confidence[node - 1] <= whole.confidence[parent - 1]
        for drafter.p_min in (0.05, 0.3, 0.9):
            part = drafter.draft(at, log, None)
            kept = whole.confidence >= drafter.p_min
            paths = prefixes(whole.tokens[1:], whole.parents[1:] - 1)
            assert prefixes(part.tokens[1:], part.parents[1:] - 1) == [p for p, k in zip(paths, kept, strict=True) if k]
            torch.testing.assert_close(part.confidence, whole.confidence[kept])
            sizes.add(len(part))
    assert {1, drafter.rows} <= sizes, "nothing was left out, or never everything"


@torch.inference_mode()
def test_confidence_is_the_drafters_own_probability(toy, session):
    log = session.log
    block = DFlashDrafter(toy.dflash, p_min=0.0)
    probs = block.block_logits(state(session, toy.dflash), log).softmax(-1)
    wanted = probs.amax(-1).cumprod(0)
    torch.testing.assert_close(block.draft(state(session, toy.dflash), log, None).confidence, wanted)
    line = Eagle3Drafter(toy.eagle3, 3, p_min=0.0)
    draft, path, likely = line.draft(state(session, toy.eagle3), log, None), [], 1.0
    for token, confidence in zip(draft.tokens[1:].tolist(), draft.confidence.tolist(), strict=True):
        likely *= float(after(line, state(session, toy.eagle3), log, tuple(path)).softmax(-1).max())
        assert confidence == pytest.approx(likely, rel=1e-4)
        path.append(token)


def after(drafter: Eagle3Drafter, at: DraftState, log, path: tuple[int, ...]) -> torch.Tensor:
    """The head's logits behind `path`, fed one token at a time."""
    model, start = drafter.model, log.length - 1
    at.cache.truncate(start)
    x = model.fuse(log.features(model.taps, start, start + 1))
    for step, token in enumerate([int(log.tokens[start + 1]), *path]):
        y = model(x, torch.tensor([[token]]), torch.tensor([start + step]), at.cache)
        at.cache.advance(1)
        x = model.feedback(y)
    at.cache.truncate(start + 1)
    return model.logits(y)[0, 0]


def test_a_chain_is_a_tree_of_width_one():
    tokens = torch.tensor([4, 2, 2, 7])
    draft, same = chain(tokens), tree(tokens, torch.tensor([-1, 0, 1, 2]), 3)
    assert draft.ancestors is None
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(draft, name), getattr(same, name))
    assert torch.equal(same.ancestors, torch.ones(4, 4).tril().bool())


@pytest.mark.parametrize("depth", range(4))
def test_a_cut_draft_is_the_upper_part(depth):
    tokens, parents = torch.tensor([1, 4, 5, 6, 7, 7, 8, 9]), torch.tensor([-1, 0, 1, 0, 1, 2, 3, 5])
    whole = tree(tokens, parents, 4)
    upper = whole.cut(depth)
    assert prefixes(upper.tokens[1:], upper.parents[1:] - 1) == [
        path for path in prefixes(tokens[1:], parents[1:] - 1) if len(path) <= depth
    ]
    same = tree(upper.tokens, upper.parents, 4)
    assert torch.equal(upper.depths, same.depths) and torch.equal(upper.ancestors, same.ancestors)
    line = chain(tokens, torch.arange(14.0).reshape(7, 2)).cut(depth)
    shorter = chain(tokens[: depth + 1], torch.arange(2.0 * depth).reshape(depth, 2))
    assert line.ancestors is None
    assert all(torch.equal(getattr(line, n), getattr(shorter, n)) for n in ("tokens", "parents", "depths", "probs"))


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda toy: DDTreeDrafter(toy.dflash, 0), "tree budget must be at least 1"),
        (lambda toy: DDTreeDrafter(toy.dflash, 4, block_size=1), "block size must be at least 2"),
        (lambda toy: DDTreeDrafter(toy.dflash, 4, block_size=0), "block size must be at least 2"),
        (lambda toy: Eagle3Drafter(toy.eagle3, 0), "a depth of at least 1 .* got depth 0 and top-k 1"),
        (lambda toy: Eagle3Drafter(toy.eagle3, 3, 0), "a top-k of 1 to 8 .* got depth 3 and top-k 0"),
        (lambda toy: Eagle3Drafter(toy.eagle3, 3, 9), "a top-k of 1 to 8 .* got depth 3 and top-k 9"),
        (lambda toy: Eagle3Drafter(toy.eagle3, 3, 2, 1), "between 2 and 11"),
        (lambda toy: Eagle3Drafter(toy.eagle3, 3, 2, 12), "between 2 and 11"),
        (lambda toy: Eagle3Drafter(toy.eagle3, 3, 1, 5), "between 2 and 4"),
    ],
)
def test_shapes_that_cannot_be(toy, build, sentence):
    with pytest.raises(WhiFlashError, match=sentence):
        build(toy)


@pytest.mark.parametrize("top_k", [1, 4])
def test_drafting_twice_from_one_root_is_drafting_once(toy, session, monkeypatch, top_k):
    """A draft leaves nothing behind that the next one sees."""
    drafter, heads = Eagle3Drafter(toy.eagle3, 4, top_k), []
    plain = toy.eagle3.logits
    monkeypatch.setattr(toy.eagle3, "logits", lambda y: heads.append(plain(y)) or heads[-1])
    with torch.inference_mode():
        drafter.draft(state(session, toy.eagle3), session.log, None)
        once = len(heads)
        drafter.draft(state(session, toy.eagle3), session.log, None)
    assert len(heads) == 2 * once
    assert all(torch.equal(a, b) for a, b in zip(heads[:once], heads[once:], strict=True))
