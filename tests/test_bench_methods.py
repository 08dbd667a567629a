"""Flags become methods; what cannot apply is refused with a sentence."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whiflash.cli import app
from whiflash.errors import WhiFlashError
from whiflash.evaluation.methods import Flags, plan, standalone


def names(**given) -> list[str]:
    return [m.name for m in plan(Flags(**given))[0]]


def test_baseline_always_runs_first():
    assert names(algorithms=("none",)) == ["AR"]
    assert names() == ["AR", "WhiFlash-Entropy df-e3"]


def test_every_combination_is_a_method():
    found = names(
        algorithms=("EAGLE3", "DFLASH", "DDTREE", "WHIFLASH"),
        pairs=("df-e3", "ddt-e3"),
        routers=("entropy", "neural"),
        tree_budgets=(32, 128),
    )
    assert found == [
        "AR", "EAGLE-3", "DFlash", "DDTree 32", "DDTree 128",
        "WhiFlash-Entropy df-e3", "WhiFlash-Neural df-e3",
        "WhiFlash-Entropy ddt-e3 32", "WhiFlash-Entropy ddt-e3 128",
        "WhiFlash-Neural ddt-e3 32", "WhiFlash-Neural ddt-e3 128",
    ]  # fmt: skip


def test_a_pair_is_compared_with_its_drafters_in_the_same_shape():
    flags = Flags(
        ("EAGLE3", "DFLASH", "DDTREE", "WHIFLASH"), pairs=("df-e3", "ddt-e3", "df-ddt"), tree_budgets=(32, 128)
    )
    assert standalone(plan(flags)[0]) == {
        "WhiFlash-Entropy df-e3": ["EAGLE-3", "DFlash"],
        "WhiFlash-Entropy ddt-e3 32": ["EAGLE-3", "DDTree 32"],
        "WhiFlash-Entropy ddt-e3 128": ["EAGLE-3", "DDTree 128"],
        "WhiFlash-Entropy df-ddt 32": ["DFlash", "DDTree 32"],
        "WhiFlash-Entropy df-ddt 128": ["DFlash", "DDTree 128"],
    }


def test_shapes_thresholds_and_catchup_reach_the_method():
    flags = Flags(
        pairs=("ddt-e3",), routers=("neural",), router_path="r", neural_threshold=0.5, tree_budgets=(128,),
        eagle_depth=3, block_size=8, no_lazy_catchup=True, no_kv_only=True,
    )  # fmt: skip
    method = plan(flags)[0][1]
    assert (method.drafters, method.router, method.threshold) == ("ddt-e3", "r", 0.5)
    assert not method.lazy and not method.kv_only
    assert (method.drafting.tree_budget, method.drafting.eagle3_depth, method.drafting.block_size) == (128, 3, 8)


def test_the_draft_is_eagles_when_eagle_runs_alone():
    sources = plan(Flags(("EAGLE3",), draft="d"))[1]
    assert (sources.dflash, sources.eagle3) == (None, "d")
    sources = plan(Flags(("NONE", "EAGLE3"), eagle_draft="e"))[1]
    assert (sources.dflash, sources.eagle3) == (None, "e")
    sources = plan(Flags(("EAGLE3", "DFLASH"), draft="d", eagle_draft="e"))[1]
    assert (sources.dflash, sources.eagle3) == ("d", "e")


REFUSED = [
    (["--speculative-algorithm", "EAGLE4"], "'EAGLE4' is not known; expected one of NONE, EAGLE3"),
    (["--speculative-algorithm", "NONE", "--draft-name-or-path", "x"], "--draft-name-or-path has no effect"),
    (["--speculative-algorithm", "DFLASH", "--whiflash-eagle-draft", "x"], "--whiflash-eagle-draft has no effect"),
    (["--speculative-algorithm", "DFLASH", "--ddtree-tree-budget", "32"], "--ddtree-tree-budget has no effect"),
    (
        ["--whiflash-drafters", "df-e3", "--ddtree-tree-budget", "32"],
        "it needs DDTREE, or WHIFLASH with a pair that has ddt",
    ),
    (["--whiflash-neural-router-threshold", "0.5"], "it needs --whiflash-router neural"),
    (["--whiflash-neural-router-path", "x"], "it needs --whiflash-router neural"),
    (["--whiflash-router", "neural", "--whiflash-entropy-threshold", "0.2"], "it needs --whiflash-router entropy"),
    (["--speculative-algorithm", "DFLASH", "--whiflash-router", "entropy"], "--whiflash-router has no effect"),
    (["--speculative-algorithm", "DFLASH", "--whiflash-drafters", "df-e3"], "--whiflash-drafters has no effect"),
    (["--speculative-algorithm", "DFLASH", "--whiflash-no-lazy-catchup"], "--whiflash-no-lazy-catchup has no effect"),
    (["--speculative-algorithm", "DFLASH", "--whiflash-no-kv-only"], "--whiflash-no-kv-only has no effect"),
    (["--speculative-algorithm", "NONE", "--draft-p-min", "0.1"], "--draft-p-min has no effect"),
    (["--speculative-algorithm", "EAGLE3", "--block-size", "8"], "--block-size has no effect"),
    (["--speculative-algorithm", "DDTREE", "--eagle-depth", "3"], "--eagle-depth has no effect"),
    (["--speculative-algorithm", "DDTREE", "--eagle-top-k", "3"], "--eagle-top-k has no effect"),
    (["--whiflash-drafters", "df-ddt", "--eagle-total-tokens", "9"], "--eagle-total-tokens has no effect"),
    (["--whiflash-router", "oracle"], "--whiflash-router 'oracle' is not known"),
    (["--whiflash-drafters", "e3-df"], "--whiflash-drafters 'e3-df' is not known"),
    (
        ["--whiflash-router", "neural", "--whiflash-neural-router-path", "x", "--whiflash-drafters", "df-e3,ddt-e3"],
        "is one router, trained for one pair",
    ),
    (
        ["--speculative-algorithm", "EAGLE3", "--draft-name-or-path", "a", "--whiflash-eagle-draft", "b"],
        "both name its draft",
    ),
    (["--ddtree-tree-budget", "many"], "takes whole numbers"),
    (["--speculative-algorithm", "DDTREE", "--ddtree-tree-budget", "1000000"], "tree budget must be at most 4096"),
    (["--speculative-algorithm", ""], "--speculative-algorithm is empty"),
    *(
        (["--whiflash-router", "neural", "--whiflash-neural-router-path", kind], "names a neural router's checkpoint")
        for kind in ("entropy", "fixed", "neural")
    ),
    (["--whiflash-router", "neural", "--whiflash-neural-router-threshold", "nan"], "threshold"),
    (["--whiflash-entropy-threshold", "-1"], "threshold"),
    (["--seed", "-1"], "a seed must be a whole number"),
    (["--dataset", "gsm"], "did you mean gsm8k"),
    (["--dataset-dir", "."], "--dataset-dir has no effect on demo"),
    (["--temperature", "-1"], "temperature"),
    (["--max-new-tokens", "0"], "at least 1"),
    (["--max-samples", "0"], "at least 1"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_what_cannot_apply_is_refused(arguments, words, tmp_path):
    found = CliRunner().invoke(app, ["bench", "--output", str(tmp_path / "out"), *arguments])
    assert isinstance(found.exception, WhiFlashError), found.output
    assert words in str(found.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--whiflash-drafters", "df-df"], "'df-df' is not known"),
        (["--whiflash-neural-router-threshold", "nan"], "threshold"),
        (["--whiflash-neural-router-path", "x"], "is one router, trained for one pair"),
    ],
)
def test_sweep_refuses_alike(arguments, words):
    found = CliRunner().invoke(app, ["sweep", *arguments])
    assert isinstance(found.exception, WhiFlashError) and words in str(found.exception)


def test_a_python_without_the_project_is_told_where_it_is():
    script = Path(__file__).parents[1] / "benchmark.py"
    found = subprocess.run([sys.executable, "-I", "-S", script], capture_output=True, text=True)
    assert found.returncode == 1
    assert "has no module whiflash; install the project" in found.stderr and "Traceback" not in found.stderr
