"""What every recorder shares: the inputs as tensors, stand-ins for absent imports, statements cut out at run time.

Not here: anything about one system (`systems/`), and any code of theirs.
Shapes: B rows, T positions.
"""

import ast
import dataclasses
import importlib.abc
import importlib.machinery
import json
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import torch

INPUTS_FILE = Path(__file__).parent / "inputs.json"
SIGNIFICANT_DIGITS = 10
INPUTS: dict[str, Any] = json.loads(INPUTS_FILE.read_text())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of one function of a system, with what went in and what came out."""

    name: str
    """Unique in its file; the start says the kind: advantage, policy_loss, kl, mismatch, gae, value_loss, reward."""
    function: str
    """The function (or method) that ran, as its file names it."""
    file: str
    """Path in the system's repository."""
    settings: Mapping[str, Any]
    """Every setting that was passed, by the system's own names."""
    inputs: Sequence[str]
    """Names in `inputs.json`."""
    outputs: Mapping[str, Any]
    """What came back, as nested lists of numbers; None stands for a number that is not finite."""
    note: str = ""
    """What a reader must know to compare, if anything."""


def tensor(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The input of that name as a fresh tensor."""
    return torch.tensor(INPUTS[name], dtype=dtype)


def rows(name: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """A [B,T] input as B tensors without the positions past each row's length."""
    return [row[:length] for row, length in zip(tensor(name, dtype), INPUTS["lengths_B"], strict=True)]


def advantages_per_token(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """`advantages_B` repeated over T positions, [B,T]."""
    return tensor("advantages_B", dtype).unsqueeze(1).expand(-1, len(INPUTS["loss_mask_BT"][0])).contiguous()


def padded(pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """Rows of different lengths as [B,T], zeros at the end."""
    width = len(INPUTS["loss_mask_BT"][0])
    return torch.stack([torch.nn.functional.pad(piece, (0, width - len(piece))) for piece in pieces])


def flat_groups(name: str) -> tuple[list[float], list[int]]:
    """The rewards of a `*_groups` input in order, and the number of each one's group."""
    groups = INPUTS[name]
    return [reward for group in groups for reward in group], [i for i, group in enumerate(groups) for _ in group]


def as_groups(values: Iterable[float], name: str) -> list[list[float]]:
    """Flat values in the grouping of a `*_groups` input."""
    iterator = iter(values)
    return [[next(iterator) for _ in group] for group in INPUTS[name]]


def loss_and_gradient(
    loss_of: Callable[[torch.Tensor], torch.Tensor], leaf: str = "policy_logprobs_BT"
) -> dict[str, Any]:
    """The loss that `loss_of` returns for the input `leaf`, and its gradient with respect to that input."""
    values = tensor(leaf).requires_grad_()
    loss = loss_of(values)
    (gradient,) = torch.autograd.grad(loss, values)
    return {"loss": loss.detach(), f"gradient_{leaf}": gradient}


def plain(value: Any) -> Any:
    """Tensors and arrays as nested lists of floats with 10 significant digits, None for what is not finite."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") + 0.0 if math.isfinite(value) else None
    return value


def field_defaults(record: Any) -> dict[str, Any]:
    """The defaults of a dataclass or a pydantic model; fields without a plain default are left out."""
    if dataclasses.is_dataclass(record):
        return {field.name: field.default for field in dataclasses.fields(record) if field.default is not MISSING}
    return {name: field.default for name, field in record.model_fields.items()}


def defaults_case(owner: str, file: str, values: Mapping[str, Any], names: Sequence[str]) -> Case:
    """The named defaults of one configuration, as a case without inputs. Raises KeyError when one is gone."""
    return Case(
        name=f"defaults_{owner}",
        function=owner,
        file=file,
        settings={},
        inputs=[],
        outputs={name: values[name] for name in names},
    )


class _StandInType(type):
    """Type of the stand-ins: any attribute exists and is a stand-in too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _StandInType(name, (StandIn,), {})
        setattr(cls, name, made)
        return made

    def __getitem__(cls, _item: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        # without it, the subscript above would make an endless sequence
        return iter(())

    def __or__(cls, _other: Any) -> Any:
        return cls

    def __ror__(cls, _other: Any) -> Any:
        return cls


class StandIn(metaclass=_StandInType):
    """Stands for anything of a package that is not installed; as a decorator it returns what it decorates."""

    def __new__(cls, *positional: Any, **named: Any) -> Any:
        if len(positional) == 1 and not named and isinstance(positional[0], type | types.FunctionType):
            return positional[0]
        return super().__new__(cls)

    def __init__(self, *_positional: Any, **_named: Any) -> None:
        pass

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return StandIn(*positional, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class _StandInModule(types.ModuleType):
    """A module of an absent package; every name in it is a stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _StandInType(name, (StandIn,), {})
        setattr(self, name, made)
        return made


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers the imports of the named packages (and all below them) with empty modules."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(name + ".") for name in self.packages):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare_imports(checkout: Path, *, stand_ins: Sequence[str] = (), folders: Sequence[str] = (".",)) -> None:
    """Put the checkout on the path, the absent packages behind stand-ins, and leave `torch.compile` out."""
    sys.path[:0] = [str(checkout / folder) for folder in folders]
    sys.meta_path.insert(0, _StandInFinder(stand_ins))

    def uncompiled(function: Any = None, **_options: Any) -> Any:
        return function if function is not None else (lambda inner: inner)

    torch.compile = uncompiled  # type: ignore[assignment]


def bare_package(name: str, folder: Path) -> None:
    """Make `name` importable without running its `__init__`, whose imports need the whole system."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def _bodies(tree: ast.AST) -> Iterable[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                yield body


def definition(source: Path, name: str) -> ast.AST:
    """The class or function of that dotted name in a source file; the whole file for an empty name."""
    node: ast.AST = ast.parse(source.read_text())
    for part in filter(None, name.split(".")):
        node = next(
            child
            for child in ast.walk(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == part
        )
    return node


def run_definitions(source: Path, names: Sequence[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute only the named top-level definitions of a source file in `namespace`, and return it."""
    nodes = [definition(source, name) for name in names]
    module = ast.Module(body=[node for node in nodes if isinstance(node, ast.stmt)], type_ignores=[])
    exec(compile(module, str(source), "exec"), namespace)
    return namespace


def run_statements(source: Path, function: str, first: str, last: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute the statements of `function` from the one that starts with `first` to the one that starts with `last`.

    Both must lie in the same block; the text compared is that of `ast.unparse`. For code that has no function of its
    own. Raises LookupError when the source has changed so that the statements are not there.
    """
    for body in _bodies(definition(source, function)):
        texts = [ast.unparse(statement) for statement in body]
        begin = next((i for i, text in enumerate(texts) if text.startswith(first)), None)
        if begin is None:
            continue
        end = next((i for i in range(begin, len(texts)) if texts[i].startswith(last)), None)
        if end is not None:
            module = ast.Module(body=body[begin : end + 1], type_ignores=[])
            exec(compile(module, str(source), "exec"), namespace)
            return namespace
    raise LookupError(f"{source}: {function} has no block with statements {first!r} to {last!r}; adapt the recorder.")
