"""Figures of one checkpoint never pass for those of another: runs, calibrations and records know what made them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import bench_kit
from whiflash import WhiFlash, WhiFlashError
from whiflash.calibration import Setting
from whiflash.evaluation.calibrate import Request, calibrate
from whiflash.evaluation.measure import measure
from whiflash.evaluation.positions import check_fits, read_record
from whiflash.evaluation.runs import read_run
from whiflash.nn.weights import digest
from whiflash.target.load import load_target


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original")
    return directory, bench_kit.build(directory / "kit", prompts=2)


@pytest.fixture
def kit(original, tmp_path):
    """A copy of its own, to be changed at will."""
    directory, kit = original
    shutil.copytree(directory / "kit", tmp_path / "kit")
    return bench_kit.Kit(**{name: tmp_path / path.relative_to(directory) for name, path in vars(kit).items()})


def train_on(checkpoint):
    """Move every matrix a little and leave norms, biases, shapes, names and the config as they are."""
    file = checkpoint / "model.safetensors"
    tensors = {
        name: t + 0.05 * t.abs().mean() if t.ndim == 2 and t.is_floating_point() else t
        for name, t in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


CHANGES = {
    "weights": train_on,
    "config": lambda path: rewrite(path / "config.json", rms_norm_eps=0.5),
    "draft vocabulary": lambda path: (path / "draft_vocabulary.json").write_text("[1, 2, 3]"),
}


def rewrite(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["dflash", "eagle3"])
def test_every_change_of_a_drafter_is_seen(which, change, kit):
    path = getattr(kit, which)
    before = digest(path)
    CHANGES[change](path)
    assert digest(path) != before


def test_a_target_is_told_by_its_weights_and_geometry_not_by_who_wrote_the_config(kit):
    def fingerprint():
        return load_target(kit.target).fingerprint()

    before = fingerprint()
    assert load_target(kit.target, dtype="bfloat16").fingerprint() == before
    rewrite(kit.target / "config.json", transformers_version="99.0", initializer_range=0.5)
    assert fingerprint() == before
    rewrite(kit.target / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    changed = fingerprint()
    assert changed != before
    train_on(kit.target)
    assert fingerprint() not in (before, changed)


def test_sharding_does_not_change_a_checkpoint(kit, tmp_path):
    whole = load_file(kit.dflash / "model.safetensors")
    parts = tmp_path / "parts"
    parts.mkdir()
    shutil.copy(kit.dflash / "config.json", parts)
    names = sorted(whole)
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: whole[n] for n in names if files[n] == file}, parts / file)
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert digest(parts) == digest(kit.dflash)


@pytest.mark.parametrize("which", ["target", "dflash", "eagle3"])
def test_a_run_is_not_resumed_with_other_weights(which, kit, tmp_path):
    request = kit.request(tmp_path / "run", tokens=4)
    measure(request)
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "results.jsonl").write_text("".join(lines[:3]))
    train_on(getattr(kit, which))
    with pytest.raises(WhiFlashError, match="was made with"):
        measure(request)
    assert (tmp_path / "run" / "results.jsonl").read_text() == "".join(lines[:3])


@pytest.fixture(scope="module")
def calibrated(original):
    """A calibration of the unchanged models, as the text of its file."""
    directory, kit = original
    costs = bench_kit.profile(directory / "costs.json", df=1.0, e3=0.5)
    models = {"target": str(kit.target), "dflash": str(kit.dflash), "eagle3": str(kit.eagle3)}
    options = {"datasets": (str(kit.prompts),), "max_samples": None, "max_new_tokens": 8, "latency_profile": costs}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHIFLASH_HOME", str(directory / "home"))
        (path,) = calibrate(Request(**options, **models, output=directory / "c.json"))
    return path


def test_a_calibration_serves_only_what_it_was_made_with(kit, calibrated):
    def use(**given):
        return WhiFlash.from_pretrained(
            kit.target, dflash=kit.dflash, eagle3=kit.eagle3, **{"threshold": str(calibrated), **given}
        )

    use()
    with pytest.raises(WhiFlashError, match=r"another dtype \(float32, not bfloat16\)"):
        use(dtype="bfloat16")
    with pytest.raises(WhiFlashError, match=r"no calibration of .* in bfloat16 on cpu"):
        use(dtype="bfloat16", threshold="auto")
    settings = {Setting.of(load_target(kit.target, dtype=d), "df-e3").default_path for d in ("float32", "bfloat16")}
    assert len(settings) == 2
    train_on(kit.dflash)
    with pytest.raises(WhiFlashError, match="another df checkpoint"):
        use()


@pytest.mark.parametrize("damage", [{"drafters": []}, {"routers": []}, {"routers": {"entropy": "x"}}, {"lengths": {}}])
def test_a_damaged_calibration_is_told(damage, kit, calibrated, tmp_path):
    found = json.loads(calibrated.read_text())
    if "lengths" in damage:
        found["routers"]["entropy"]["categories"]["overall"] |= damage
    else:
        found |= damage
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(found))
    with pytest.raises(WhiFlashError, match="is damaged"):
        WhiFlash.from_pretrained(kit.target, dflash=kit.dflash, eagle3=kit.eagle3, threshold=str(path))


def test_a_record_explains_only_greedy_runs_of_its_own_models(kit, calibrated, tmp_path):
    record = read_record(calibrated)
    flags = kit.flags(("DFLASH", "EAGLE3", "WHIFLASH"))
    check_fits(record, read_run(measure(kit.request(tmp_path / "greedy", 4, flags))))
    sampled = kit.request(tmp_path / "sampled", 4, flags)
    object.__setattr__(sampled.protocol, "temperature", 1.0)
    with pytest.raises(WhiFlashError, match="sampled at temperature 1, but a record holds greedy answers"):
        check_fits(record, read_run(measure(sampled)))
    train_on(kit.eagle3)
    with pytest.raises(WhiFlashError, match="another e3 drafter"):
        check_fits(record, read_run(measure(kit.request(tmp_path / "other", 4, flags))))


def test_rows_are_probed_in_every_precision(tmp_path):
    tensors = {"a": torch.arange(12.0).view(6, 2), "b": torch.tensor(3.0), "c": torch.arange(4), "d": torch.zeros(0, 2)}
    digests = set()
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        path = tmp_path / str(dtype)
        path.mkdir()
        save_file({**tensors, "a": tensors["a"].to(dtype)}, path / "model.safetensors")
        digests.add(digest(path))
    assert len(digests) == 4
