"""Recipes: small TOML files that say how drafters and routers are trained; what they leave out is default."""

import sys
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from whiflash.errors import WhiFlashError
from whiflash.target.load import DTYPES
from whiflash.target.target import Target
from whiflash.training.dflash import DFlashRecipe
from whiflash.training.eagle3 import Eagle3Recipe
from whiflash.training.router import RouterRecipe
from whiflash.training.synthesize import DataRecipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

T = TypeVar("T")


@dataclass(frozen=True)
class TextRecipe:
    """What is learned from: texts cut to `max_length` tokens, about `held_out` of them kept for evaluation.

    About `apart` more are kept from the drafters for the routers, since a drafter gets far more accepted on texts that
    it learned from; 0 lets routers learn from the drafters' texts, as is right for drafters trained elsewhere.

    `taps` are boundary ids (tap k: the residual stream after k layers); left out, an early, a middle and a late one.
    `online` computes the target's states when they are needed instead of keeping them on disk. `precision` is that of
    the target when it reads the training texts (left out: as it was loaded), bfloat16 being faster on some machines.
    """

    taps: tuple[int, ...] | None = None
    max_length: int = 1024
    held_out: int = 80
    apart: int = 400
    online: bool = False
    precision: str | None = None

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in DTYPES:
            raise WhiFlashError(f"precision {self.precision!r} is not known; expected one of {', '.join(DTYPES)}")
        if self.max_length < 4 or self.held_out < 1 or self.apart < 0 or (self.taps is not None and not self.taps):
            raise WhiFlashError("max_length must be at least 4, held_out 1, apart 0, and taps not empty")

    def check(self, target: Target) -> None:
        if self.taps is not None and not all(0 <= tap <= target.layers + 1 for tap in self.taps):
            raise WhiFlashError(f"taps {list(self.taps)} do not all exist in {target.name}, of {target.layers} layers")


@dataclass(frozen=True)
class Shares:
    """Parts of a time budget; what they leave is for states, evaluation and routers."""

    data: float = 0.25
    eagle3: float = 0.3
    dflash: float = 0.35

    def __post_init__(self) -> None:
        if min(self.data, self.eagle3, self.dflash) < 0 or self.data + self.eagle3 + self.dflash > 1:
            raise WhiFlashError("the shares of the hours must not be negative nor exceed 1 together")


@dataclass(frozen=True)
class Recipe:
    data: DataRecipe = field(default_factory=DataRecipe)
    texts: TextRecipe = field(default_factory=TextRecipe)
    eagle3: Eagle3Recipe = field(default_factory=Eagle3Recipe)
    dflash: DFlashRecipe = field(default_factory=DFlashRecipe)
    router: RouterRecipe = field(default_factory=RouterRecipe)
    shares: Shares = field(default_factory=Shares)

    def seeded(self, seed: int) -> "Recipe":
        """The same recipe with every random choice drawn from another seed."""
        return replace(
            self,
            data=replace(self.data, seed=seed),
            eagle3=replace(self.eagle3, loop=replace(self.eagle3.loop, seed=seed)),
            dflash=replace(self.dflash, loop=replace(self.dflash.loop, seed=seed)),
            router=replace(self.router, seed=seed),
        )


def shipped() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def load_recipe(name: str | Path | None = None, target: str = "") -> Recipe:
    """A recipe by file or by the name of a shipped one; None takes the one shipped for `target`, else the defaults."""
    if name is None:
        if target not in shipped():
            return Recipe()
        name = target
    path = Path(name)
    if path.is_file():
        text = path.read_bytes()
    elif str(name) in shipped():
        text = (_folder() / f"{name}.toml").read_bytes()
    else:
        raise WhiFlashError(f"recipe {str(name)!r} is neither a file nor one of {', '.join(shipped())}")
    try:
        table = tomllib.loads(text.decode("utf-8"))
    except ValueError as error:
        raise WhiFlashError(f"recipe {name} is not valid TOML ({error})") from error
    return _build(Recipe, table, f"recipe {name}")


def _folder() -> Any:
    return files("whiflash.training") / "recipes"


def _build(kind: type[T], table: dict[str, Any], where: str) -> T:
    """A (nested) dataclass from a table, refusing names and types that do not belong."""
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in names:
            raise WhiFlashError(f"{where} has no setting {key!r}; expected one of {', '.join(names)}")
        hint = hints[key]
        if is_dataclass(hint):
            if not isinstance(value, dict):
                raise WhiFlashError(f"{where}: {key} must be a table, [{key}]")
            values[key] = _build(hint, value, f"{where}, [{key}]")  # type: ignore[arg-type]
        elif not _fits(value, hint):
            name = hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else hint
            raise WhiFlashError(f"{where}: {key} = {value!r} is not a {name}")
        else:
            values[key] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, part) for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
