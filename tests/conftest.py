"""What most tests share. Nothing here needs a network."""

import os
from pathlib import Path

import pytest

from whiflash.target import embedded
from whiflash.target.load import load_target
from whiflash.target.target import Target

SHARED = Path(os.environ.get("WHIFLASH_SHARED", Path(__file__).parents[2] / "shared"))


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A ten-token target with its drafters: see `toy.py`."""
    from toy import Toy

    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Prompts and checkpoints handed out for development; tests that need them are skipped elsewhere."""
    if not (SHARED / "checkpoints").is_dir():
        pytest.skip("no shared checkpoints here (WHIFLASH_SHARED)")
    return SHARED


@pytest.fixture(scope="session")
def smollm() -> Target:
    """The embedded target, where it was prepared already."""
    if not embedded.is_intact(embedded.home() / "targets" / embedded.NAME):
        pytest.skip("the embedded target is not in the cache yet")
    return load_target()


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A tiny chat model and drafters for it on disk: see `tiny.py`."""
    import tiny

    home = tmp_path_factory.mktemp("saved")
    target = tiny.build(home / "target", max_position_embeddings=4096)
    vocab = len(tiny.tokenizer()) + tiny.PADDING
    return {
        "target": target,
        "dflash": tiny.write(home / "dflash", *tiny.dflash_model(vocab, 6)),
        "eagle3": tiny.write(home / "eagle3", *tiny.eagle3_head(vocab)),
    }
